"""Cache slots of caches that keep a window of each request: who uses which page, and which cached windows are evicted.

A page is free, or used by the rows of running requests (counted), or cached in the prefix tree, or both of the latter.
Pages that the tree has and no row uses can be evicted: first, of every cached run of tokens, the part before its last
window, because a match that ends there needs no more; then whole windows, the least recently used first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from sglang.srt.mem_cache.allocator import Slots, TokenAllocator
from sglang.srt.mem_cache.radix_node import Node, NodesCallback
from sglang.srt.plan.pool_sizes import PoolSizes, window_tokens

Lengths = npt.NDArray[np.int32]
BEFORE_THE_WINDOW, IN_THE_WINDOW = 0, 1


class WindowTable:
    """Rows like those of `KVTable`, in which a request has the positions from `start` on: enough that the next token
    sees its window, and that the window before the last whole page is complete when the request ends. Windows that are
    chunks begin at a multiple of their size.

    The tree's slots are arrays as long as its tokens, with 0 for pages that it does not have.
    """

    def __init__(self, index: int, sizes: PoolSizes) -> None:
        """`index`: position of the window in `sizes` and in `Node.windows`."""
        self.index = index
        self.window, self.chunked = sizes.windows[index].window, sizes.windows[index].chunked
        self.page_size, self.uncertain_slots = sizes.page_size, sizes.uncertain_slots
        self.allocator = TokenAllocator(sizes.windows[index].tokens, sizes.page_size)
        self.rows = np.zeros((sizes.max_requests + 1, sizes.context_len), np.int32)
        self.start = np.zeros(sizes.max_requests + 1, np.int32)
        self._users = np.zeros(self.allocator.num_pages + 1, np.int32)
        self._cached = np.zeros(self.allocator.num_pages + 1, np.bool_)
        self._num_evictable = 0
        self._entries = 0  # breaks ties in the heap, so that nodes are never compared
        self._heap: list[tuple[int, int, int, Node]] = []
        self._num_gone = 0  # heap entries of nodes that have left the tree
        self.before_eviction: NodesCallback | None = None
        """Is told of nodes whose last windows are about to lose pages."""
        self.now: Callable[[], int] = int
        """Returns the time of the tree's latest use, which the tree sets."""

    # --- sizes in tokens ----------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Returns the tokens for which there are slots."""
        return self.allocator.size

    def available_size(self) -> int:
        """Returns the tokens that are free, or cached and used by nobody."""
        return self.allocator.available_size() + self._num_evictable * self.page_size

    def usage(self) -> dict[str, int]:
        """Returns the tokens that are free, cached, held by requests alone, and in total."""
        cached = int(self._cached.sum()) * self.page_size
        used = int(((self._users > 0) & ~self._cached).sum()) * self.page_size
        return {"free": self.allocator.available_size(), "cached": cached, "held": used, "total": self.size}

    def max_request_tokens(self) -> int:
        """Returns the most tokens, in whole pages, that a decoding request has."""
        return window_tokens(self.window, self.page_size, self.uncertain_slots)

    def max_prompt_tokens(self, chunk: int) -> int:
        """Returns the most tokens, in whole pages, that a request has while `chunk` tokens of its prompt are computed,
        and when it decodes after them."""
        return window_tokens(self.window, self.page_size, chunk + self.uncertain_slots - 1)

    def max_solo_tokens(self) -> int:
        """Returns the size of a chunk that always fits for a request that runs alone."""
        return max(0, (self.size - self.max_prompt_tokens(0)) // self.page_size * self.page_size - self.page_size)

    def room(self, slots: npt.NDArray[np.int64], lens: Lengths, limits: Lengths) -> int:
        """Returns the tokens that further requests may use while these (with `lens` tokens, uncertain_slots to
        `limits`) decode on and all other rows keep what they have."""
        page = self.page_size
        maximum = np.minimum(self.max_request_tokens(), -(-limits // page) * page).sum()
        kept = (-(-lens // page) * page - self.start[slots]).sum()
        return self.size - int(maximum) - (int(self._users.sum()) * page - int(kept))

    def first_kept(self, lens: Lengths) -> Lengths:
        """Returns the first position that requests of these lengths must keep."""
        page = self.page_size
        whole = lens // page * page
        first: Lengths = (whole - self.seen_before(whole)) // page * page
        return first

    def num_kept(self, length: int) -> int:
        """Returns how many positions before its end a sequence of this length must keep."""
        return length - int(self.first_kept(np.array([length], np.int32))[0])

    def seen_before(self, positions: Lengths) -> Lengths:
        """Returns how many tokens before each position the token there sees."""
        return positions % self.window if self.chunked else np.minimum(positions, self.window - 1)

    # --- pages --------------------------------------------------------------------------------------------------------

    def _pages(self, slots: Slots) -> Slots:
        """Returns the pages of runs of whole pages, without absent ones."""
        pages: Slots = slots[:: self.page_size] // self.page_size
        return pages[pages > 0]

    def use(self, slots: Slots) -> None:
        """Counts one more row that uses these whole pages."""
        pages = self._pages(slots)
        self._num_evictable -= int((self._cached[pages] & (self._users[pages] == 0)).sum())
        self._users[pages] += 1

    def drop_use(self, slots: Slots) -> None:
        """Counts one row less that uses these whole pages."""
        self._drop_use(self._pages(slots))

    def _drop_use(self, pages: Slots) -> None:
        np.subtract.at(self._users, pages, 1)
        unused = pages[self._users[pages] == 0]
        if not unused.size:
            return
        cached = self._cached[unused]
        if cached.any():
            self._num_evictable += len(np.unique(unused[cached]))  # several rows may have shared a page
        self.allocator.free(unused[~cached] * self.page_size)

    def take(self, num_tokens: int) -> Slots | None:
        """Returns slots of whole pages, counted as used as if a row had them; None without room."""
        self.evict(num_tokens - self.allocator.available_size())
        slots = self.allocator.alloc([0], [num_tokens], [0])
        if slots is not None:
            self._users[self._pages(slots)] += 1
        return slots

    # --- requests -----------------------------------------------------------------------------------------------------

    def grow(self, slots: npt.NDArray[np.int64], old_lens: Lengths, new_lens: Lengths) -> Slots:
        """Allocates slots like `KVTable.grow`; the caller has made sure that there is room."""
        locs = self.allocator.alloc(old_lens, new_lens, self.rows[slots, np.maximum(old_lens - 1, 0)])
        assert locs is not None, "slots of a window were promised that are not there"
        self._users[locs // self.page_size] = 1  # a page that is not full belongs to one request
        return locs

    def leave(self, slots: npt.NDArray[np.int64], lens: Lengths) -> None:
        """Gives up the positions that requests of these lengths no longer need."""
        first, start = self.first_kept(lens), self.start[slots]
        moves = np.flatnonzero(first > start)
        if not moves.size:
            return
        rows, begin, end = slots[moves], start[moves], first[moves]
        counts = (end - begin) // self.page_size
        if counts.max() > 1:
            rows, begin = np.repeat(rows, counts), np.repeat(begin, counts)
            begin = begin + (np.arange(len(begin)) - np.repeat(np.cumsum(counts) - counts, counts)) * self.page_size
        self._drop_use(self.rows[rows, begin] // self.page_size)
        self.start[slots[moves]] = end

    def slots_of(self, slot: int, length: int) -> Slots:
        """Returns a row's [length] slots, 0 for positions that it gave up."""
        slots = self.rows[slot, :length].copy()
        slots[: self.start[slot]] = 0
        return slots

    def release(self, slot: int, length: int) -> None:
        """Gives up the row of a request of `length` tokens."""
        self.drop_use(self.rows[slot, self.start[slot] : length])
        self.start[slot] = 0

    # --- the tree -----------------------------------------------------------------------------------------------------

    def share(self, cached: Slots, of_request: Slots) -> tuple[Slots, Slots]:
        """Shares tokens that a request has computed with the tree: takes and returns the slots of both. The tree takes
        the pages that it lacks; where both have a page, the request changes over to the tree's."""
        lacks = (cached == 0) & (of_request != 0)
        self._cached[self._pages(of_request[lacks])] = True
        twice = (cached != 0) & (of_request != 0) & (cached != of_request)
        if twice.any():
            self.use(cached[twice])
            self.drop_use(of_request[twice])
        merged = np.where(cached == 0, of_request, cached)
        return merged, np.where(of_request == 0, of_request, merged)

    def drop(self, cached: Slots) -> None:
        """Frees these slots of the tree, which no row has."""
        pages = self._pages(cached)
        assert not self._users[pages].any(), "the tree gave up a window that is in use"
        self._cached[pages] = False
        self._num_evictable -= pages.size
        self.allocator.free(pages * self.page_size)

    def tail(self, path: list[Node], depth: int) -> Slots:
        """Returns the slots that a request begins with whose cached prefix of `depth` tokens ends with `path` (deepest
        first): those of the positions from first_kept on."""
        missing = depth - int(self.first_kept(np.array([depth], np.int32))[0])
        parts: list[Slots] = []
        for node in path:
            if missing <= 0:
                break
            parts.append(node.windows[self.index][-missing:])
            missing -= parts[-1].size
        return np.concatenate(parts[::-1]) if parts else np.empty(0, np.int32)

    def queue(self, node: Node, tier: int | None = None) -> None:
        """Queues a node for eviction, which looks at the node's slots of that time. tier: BEFORE_THE_WINDOW or
        IN_THE_WINDOW; None: found from its slots."""
        if not node.in_window_heap >> self.index & 1:
            if tier is None:
                tier = BEFORE_THE_WINDOW if self._num_before_window(node) else IN_THE_WINDOW
            self._push(node, tier, node.last_access)

    def _push(self, node: Node, tier: int, queued_at: int) -> None:
        node.in_window_heap |= 1 << self.index
        node.window_entries[self.index] += 1
        self._entries += 1
        heapq.heappush(self._heap, (tier, queued_at, self._entries, node))

    def reinsert(self, node: Node) -> None:
        """Adds a second entry that comes before the first one, because the node's time of last use has become
        earlier."""
        if node.in_window_heap >> self.index & 1:
            self._push(node, BEFORE_THE_WINDOW, node.last_access)

    def forget(self, node: Node) -> None:
        """Notes that the node has left the tree. Where nothing is ever evicted, old entries would otherwise pile up."""
        self._num_gone += node.window_entries[self.index]
        if 2 * self._num_gone > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[3].parent is not None]
            heapq.heapify(self._heap)
            self._num_gone = 0

    def evict(self, num_tokens: int) -> int:
        """Frees at least `num_tokens` tokens, if that many are evictable. Returns the number of tokens freed.

        A node whose remaining pages rows use is queued as if it had been used just now: its rows probably go on, and
        otherwise each later eviction would look at it again.
        """
        if self.before_eviction is not None and num_tokens > 0:
            self.before_eviction(self._next_evicted(-(-num_tokens // self.page_size)))
        missing = min(-(-num_tokens // self.page_size), self._num_evictable)
        freed, in_use, partly_evicted = 0, list[Node](), list[Node]()
        while freed < missing:
            tier, queued_at, _, node = heapq.heappop(self._heap)
            node.in_window_heap &= ~(1 << self.index)
            node.window_entries[self.index] -= 1
            slots = node.windows[self.index]
            if node.parent is None:
                self._num_gone -= 1
                continue
            if not slots.any():
                continue
            if node.last_access > queued_at:
                self.queue(node, tier)
                continue
            end = slots.size if tier == IN_THE_WINDOW else self._num_before_window(node)
            freed += self._evict_from(slots[:end], missing - freed)
            if tier == BEFORE_THE_WINDOW:
                self.queue(node, IN_THE_WINDOW)
            elif slots.any():
                (in_use if freed < missing else partly_evicted).append(node)
        for node in in_use:
            self._push(node, IN_THE_WINDOW, max(self.now(), node.last_access))
        for node in partly_evicted:
            self.queue(node)
        return freed * self.page_size

    def _num_before_window(self, node: Node) -> int:
        """Returns how many of a node's positions lie before its last window."""
        return max(0, node.key.size - self.num_kept(node.depth))

    def _next_evicted(self, num_pages: int) -> list[Node]:
        """Returns the nodes whose last windows lose pages if `num_pages` are freed. Follows the order of `evict`
        without changing anything."""
        nodes, done = list[Node](), set[tuple[int, Node]]()
        heap = [(*self._heap[0], 0, 0)] if self._heap else []
        """Entries, each with its place among those of the table, below which two others lie, and with the first
        position that counts. At -1 are entries that `evict` would make."""
        entries = self._entries
        while num_pages > 0 and heap:
            tier, queued_at, entry, node, place, begin = heapq.heappop(heap)
            if place >= 0:
                for below in range(2 * place + 1, min(2 * place + 3, len(self._heap))):
                    heapq.heappush(heap, (*self._heap[below], below, 0))
            if node.parent is None or (tier, node) in done:
                continue
            if node.last_access > queued_at:
                heapq.heappush(heap, (tier, node.last_access, entry, node, -1, begin))
                continue
            done.add((tier, node))
            slots = node.windows[self.index]
            end = slots.size if tier == IN_THE_WINDOW else self._num_before_window(node)
            count = self._unused(slots[begin:end]).size
            num_pages -= count
            if tier == BEFORE_THE_WINDOW:
                entries += 1
                heapq.heappush(heap, (IN_THE_WINDOW, node.last_access, entries, node, -1, end))
            elif count:
                nodes.append(node)
        return nodes

    def _unused(self, slots: Slots) -> npt.NDArray[np.intp]:
        """Returns the indices of whole pages that exist and that no row uses."""
        starts = slots[:: self.page_size]
        return np.flatnonzero((starts != 0) & (self._users[starts // self.page_size] == 0))

    def _evict_from(self, slots: Slots, num_pages: int) -> int:
        """Evicts up to `num_pages` pages that no row uses, from the front. Returns how many."""
        starts = slots[:: self.page_size]
        unused = self._unused(slots)[:num_pages]
        pages = starts[unused] // self.page_size
        self.drop(pages.repeat(self.page_size) * self.page_size)
        slots.reshape(-1, self.page_size)[unused] = 0
        return int(unused.size)

    def reset(self) -> None:
        """Empties the table; the tree is empty, and there are no requests."""
        self._heap.clear()
        self._num_gone = 0
        assert self.allocator.available_size() == self.size, "slots of a window are lost"

    # --- invariants ---------------------------------------------------------------------------------------------------

    def check(self, nodes: list[Node], rows: dict[int, int]) -> None:
        """Raises AssertionError if the table is inconsistent. `rows`: length by slot of every running request. Slow."""
        page = self.page_size
        users, cached = np.zeros_like(self._users), np.zeros_like(self._cached)
        for slot, length in rows.items():
            needed = length - int(self.seen_before(np.array([length], np.int32))[0])
            assert self.start[slot] <= needed, "a request gave up what its window needs"
            pages = self._pages(self.rows[slot, self.start[slot] : length])
            assert pages.size == -(-(length - self.start[slot]) // page), "a row lacks a page"
            users[pages] += 1
        for node in nodes:
            slots = node.windows[self.index]
            assert slots.size == node.key.size, f"{node.key.size} tokens with {slots.size} slots of a window"
            by_page = slots.reshape(-1, page)
            assert (by_page == np.where(by_page[:, :1] == 0, 0, by_page[:, :1] + np.arange(page))).all(), "a torn page"
            assert not cached[self._pages(slots)].any(), "two nodes have the same page of a window"
            cached[self._pages(slots)] = True
            assert not slots.any() or node.in_window_heap >> self.index & 1, "a window that eviction will never find"
        assert (users == self._users).all(), "users of pages are counted wrongly"
        assert (cached == self._cached).all(), "the tree has other pages than the table says"
        assert self._num_evictable == int((cached & (users == 0)).sum()), "evictable pages are counted wrongly"
        taken = np.flatnonzero((users > 0) | cached) * page
        assert not self.allocator.is_free(taken).any(), "a page that is in use is free"
        gone = sum(entry[3].parent is None for entry in self._heap)
        assert gone == self._num_gone, "nodes that have left the tree are counted wrongly"
        assert taken.size * page + self.allocator.available_size() == self.size, "slots of a window are lost"
