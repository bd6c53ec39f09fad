"""Prefix cache: a radix tree over token ids (`Keys`) whose nodes own the KV slots of those tokens.

Who owns a slot: the allocator (free), the tree (cached), or one request (computed, not yet given to the tree). `commit`
moves slots from a request to the tree, `evict` gives slots back. Everything is page aligned; the tail of a request that
does not fill a page stays with the request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang.srt.mem_cache.allocator import Slots, TokenAllocator
from sglang.srt.mem_cache.checkpoint_table import CheckpointTable
from sglang.srt.mem_cache.eviction_queue import EvictionQueue, RetentionQueue
from sglang.srt.mem_cache.node_chains import MAX_PATH, chains
from sglang.srt.mem_cache.radix_node import EMPTY, Edge, Keys, Node, NodesCallback, compact
from sglang.srt.mem_cache.window_table import WindowTable

Tokens = Sequence[int] | npt.NDArray[np.integer]

KEPT = 1 << 48
"""Added to the time of last use of kept prefixes; no clock reaches it."""


@dataclass(frozen=True, slots=True)
class Match:
    """The number of leading tokens that are cached, and the node where they end (the root if nothing matched)."""

    length: int
    node: Node


@dataclass(frozen=True, slots=True)
class Commit:
    """The state of a request after a commit: its slots (the tree's own where the tree had the tokens already), the node
    that it holds locked, the number of leading tokens that belong to the tree, and its slots in each window table."""

    indices: Slots
    node: Node
    num_cached: int
    windows: Sequence[Slots] = ()


class RadixCache:
    """Prefix cache of one memory. `enabled=False` caches nothing: requests own their slots to the end."""

    def __init__(
        self,
        allocator: TokenAllocator,
        page_size: int,
        enabled: bool = True,
        windows: Sequence[WindowTable] = (),
        checkpoints: CheckpointTable | None = None,
    ) -> None:
        assert page_size == allocator.page_size, "the tree and the allocator must agree on the page size"
        self.allocator = allocator
        self.page_size = page_size
        self.windows = windows
        self.checkpoints = checkpoints
        self.enabled = enabled
        self.before_eviction: NodesCallback | None = None
        """Is told of nodes that are about to lose tokens."""
        self.is_remembered: Callable[[Node], bool] = lambda node: False
        """Returns whether somebody who has not locked a node needs its end."""
        self.max_path = MAX_PATH
        """Nodes of a path that are no reason yet to merge chains."""
        for window in windows:
            window.now = lambda: self._clock
        self._start()

    def _start(self) -> None:
        self._clock = 0
        self._evictable = 0
        self._protected = 0
        self._kept = 0
        self._evictions, self._kept_nodes = EvictionQueue(), RetentionQueue()
        self.root = Node(np.empty(0, np.int64), EMPTY, None, b"", 0)

    # --- sizes in tokens ----------------------------------------------------------------------------------------------

    def evictable_size(self) -> int:
        """Returns the cached tokens that nobody has locked."""
        return self._evictable

    def protected_size(self) -> int:
        """Returns the cached tokens that are locked."""
        return self._protected

    def total_size(self) -> int:
        """Returns the cached tokens, evictable and locked ones."""
        return self._evictable + self._protected

    # --- lookup and insertion -----------------------------------------------------------------------------------------

    def match_prefix(self, token_ids: Tokens, namespace: str | None = None, known: Node | None = None) -> Match:
        """Returns the longest cached, page-aligned prefix from which a request can go on: every window table has the
        window before its end, and a model with states has a checkpoint there. Lock the node before anything is evicted.

        `known`: the node where an earlier match of the same request ended. While that node is in the tree, only the
        tokens after it are compared, so that a long prompt may be matched in every step that it waits.
        """
        if not self.enabled:
            return Match(0, self.root)
        tokens = self._aligned(token_ids)
        self._clock += 1
        if known is None or known.parent is None:
            known = self.root
        path = self.path(known)
        for n in path:
            self._use(n)
        node, passed = self._descend(known, tokens[known.depth :], namespace)
        deepest = node
        while node.parent is not None and not self._can_resume(node):
            node = node.parent
        if passed:
            self._shorten(deepest, len(path) + len(passed), node)
        return Match(node.depth, node)

    def follow(self, token_ids: Tokens, namespace: str | None = None) -> list[Node]:
        """Returns the nodes that match these tokens, from the root on, whether or not their windows and states are
        cached. Counts as a use of them."""
        if not self.enabled:
            return []
        self._clock += 1
        node, passed = self._descend(self.root, self._aligned(token_ids), namespace)
        return self.path(node)[::-1] if self._shorten(node, len(passed), node) else passed

    def _can_resume(self, node: Node) -> bool:
        if self.checkpoints is not None and not node.checkpoint:
            return False
        return all(self._has_window(node, window) for window in self.windows)

    def _has_window(self, node: Node, window: WindowTable) -> bool:
        missing = int(window.seen_before(np.array(node.depth, np.int32)))
        for n in self._path(node):
            if missing <= 0:
                break
            if not n.windows[window.index][-missing:].all():
                return False
            missing -= n.key.size
        return True

    def slots_to(self, node: Node) -> Slots:
        """Returns the slots of the tokens from the root to the end of `node`."""
        return _concat([n.value for n in self._path(node)][::-1])

    def _aligned(self, token_ids: Tokens) -> Keys:
        tokens = np.asarray(token_ids, np.int64)
        return tokens[: len(tokens) // self.page_size * self.page_size]

    def _edge(self, tokens: Keys, parent: Node, namespace: str | None) -> Edge:
        first_page = tokens[: self.page_size].tobytes()
        return (namespace, first_page) if parent is self.root and namespace is not None else first_page

    def _descend(self, node: Node, tokens: Keys, namespace: str | None) -> tuple[Node, list[Node]]:
        """Follows `tokens` below `node` as far as they match, splitting the last node where they differ. Returns the
        deepest node, and those on the path to it."""
        passed: list[Node] = []
        while tokens.size:
            child = node.children.get(self._edge(tokens, node, namespace))
            if child is None:
                break
            common = self._common_length(child.key, tokens)
            if common < child.key.size:
                child = self._split(child, common)
            self._use(child)
            passed.append(child)
            tokens = tokens[common:]
            node = child
        return node, passed

    def _add_leaf(self, parent: Node, tokens: Keys, indices: Slots, namespace: str | None) -> Node:
        edge = self._edge(tokens, parent, namespace)
        leaf = Node(tokens.copy(), indices.copy(), parent, edge, self._clock)
        leaf.windows = [np.zeros(tokens.size, np.int32) for _ in self.windows]
        leaf.window_entries = [0] * len(self.windows)
        leaf.tried = parent.tried
        parent.children[edge] = leaf
        self._evictable += tokens.size
        self._queue(leaf)
        return leaf

    def _common_length(self, key: Keys, tokens: Keys) -> int:
        length = min(key.size, tokens.size)
        differ = key[:length] != tokens[:length]
        first = int(differ.argmax()) if length else 0
        common = first if differ[first] else length
        return common // self.page_size * self.page_size

    def _split(self, node: Node, length: int) -> Node:
        """Puts a new node above `node` that takes its first `length` tokens. `node` stays the deep end, so that the
        locks that point at it still cover the whole path."""
        parent = node.parent
        assert parent is not None
        upper = Node(compact(node.key[:length]), compact(node.value[:length]), parent, node.edge, node.last_access)
        upper.tried = node.tried
        upper.kept_until = node.kept_until
        if upper.kept_until:
            self._kept_nodes.add(upper)
        upper.lock_ref = node.lock_ref  # its depth follows from its parent's; that of `node` stays
        parent.children[node.edge] = upper
        node.key, node.value, node.parent = compact(node.key[length:]), compact(node.value[length:]), upper
        upper.windows = [compact(w[:length]) for w in node.windows]
        node.windows = [compact(w[length:]) for w in node.windows]
        upper.window_entries = [0] * len(self.windows)
        for window in self.windows:
            window.queue(upper)
        node.edge = node.key[: self.page_size].tobytes()
        upper.children[node.edge] = node
        return upper

    def _shorten(self, node: Node, length: int, end: Node) -> bool:
        """Merges the chains of the path to `node` if that has become long (`length` nodes, all just used) and has twice
        the nodes that the last attempt left. The ends of `node` and of `end`, which is on the path, stay. Returns
        whether anything has changed."""
        if length <= max(self.max_path, 2 * node.tried):
            return False
        runs = list(chains(self.path(node)[::-1], self.windows, lambda n: n is end or self.is_remembered(n)))
        for run in runs:
            self._merge(run)
        for number, n in enumerate(self.path(node)[::-1], 1):
            n.tried = number
        return bool(runs)

    def _merge(self, run: list[Node]) -> None:
        """Makes one node of the nodes of a chain. As in `_split`, the deep end stays, to which locks point."""
        *uppers, node = run
        parent = run[0].parent
        assert parent is not None
        node.key, node.value = np.concatenate([n.key for n in run]), _concat([n.value for n in run])
        node.windows = [np.concatenate(parts) for parts in zip(*(n.windows for n in run), strict=True)]
        node.shrunk = all(n.shrunk for n in run)  # else the others would never be announced to `before_eviction`
        node.parent, node.edge = parent, run[0].edge
        parent.children[node.edge] = node
        for upper in uppers:
            self._evictions.drop(upper)
            upper.parent, upper.children = None, {}
            for window in self.windows:
                window.forget(upper)

    # --- locks and eviction -------------------------------------------------------------------------------------------

    def lock(self, node: Node) -> None:
        """Keeps the path from `node` to the root from eviction until the matching unlock."""
        for n in self._path(node):
            if n.lock_ref == 0:
                self._evictable -= n.key.size
                self._protected += n.key.size
            n.lock_ref += 1

    def unlock(self, node: Node) -> None:
        """Ends one `lock` of the path from `node` to the root."""
        for n in self._path(node):
            assert n.lock_ref > 0, "a radix node was unlocked more often than locked"
            n.lock_ref -= 1
            if n.lock_ref == 0:
                self._evictable += n.key.size
                self._protected -= n.key.size
                self._queue(n)

    def _use(self, node: Node) -> None:
        node.last_access = self._clock + (KEPT if node.kept_until else 0)

    def keep(self, node: Node, until: float) -> None:
        """Evicts the path to `node` only after all others, until `expire` is called with that time. At most half of the
        pool is kept so: beyond it, prefixes with the earliest expiry are treated like any other."""
        for n in self._path(node):
            if not n.kept_until:
                n.last_access += KEPT
                self._kept += n.key.size
            if n.kept_until < until:
                n.kept_until = until
                self._kept_nodes.add(n)
        while self._kept > self.allocator.size // 2:
            first = self._kept_nodes.pop(math.inf)
            assert first is not None, "more is kept than there are nodes for it"
            self._end_retention(first)

    def expire(self, now: float) -> None:
        """Stops keeping the prefixes whose time is not after `now`. Every rank must give the same time."""
        while (node := self._kept_nodes.pop(now)) is not None:
            self._end_retention(node)

    def kept_size(self) -> int:
        """Returns the tokens that are kept before others."""
        return self._kept

    def _end_retention(self, node: Node) -> None:
        """Treats a kept node like any other from now on."""
        node.kept_until = 0.0
        node.last_access -= KEPT
        self._kept -= node.key.size
        if self._evictions.drop(node):
            self._evictions.add(node)
        for window in self.windows:
            window.reinsert(node)
        if self.checkpoints is not None:
            self.checkpoints.reinsert(node)

    def path(self, node: Node) -> list[Node]:
        """Returns the nodes from `node` up to the child of the root."""
        return list(self._path(node))

    def _path(self, node: Node) -> Iterator[Node]:
        while node.parent is not None:
            yield node
            node = node.parent
        assert node is self.root, "the node is no longer in the tree"

    def _queue(self, node: Node) -> None:
        """Makes sure that an evictable leaf is in the queue."""
        if not node.children and node.lock_ref == 0 and node is not self.root:
            self._evictions.add(node)

    def evict(self, num_tokens: int) -> int:
        """Frees at least `num_tokens` tokens, if that many are evictable: least recently used leaves first, from their
        ends, rounded up to pages. Returns the number of tokens freed."""
        freed: list[Slots] = []
        missing = -(-num_tokens // self.page_size) * self.page_size
        if self.before_eviction is not None and missing > 0:
            self.before_eviction(self._evictions.next_evicted(missing, self.root))
        while missing > 0 and (node := self._evictions.pop()) is not None:
            taken = min(missing, node.key.size)
            freed.append(node.value[node.value.size - taken :])
            missing -= taken
            self._shrink(node, taken)
        slots = _concat(freed)
        self._evictable -= slots.size
        self.allocator.free(slots)
        return int(slots.size)

    def _shrink(self, leaf: Node, num_tokens: int) -> None:
        keep = leaf.key.size - num_tokens
        self._kept -= num_tokens if leaf.kept_until else 0
        for window in self.windows:
            window.drop(leaf.windows[window.index][keep:])
        leaf.windows = [compact(w[:keep]) for w in leaf.windows]
        if self.checkpoints is not None:
            self.checkpoints.drop(leaf)
        if keep:
            leaf.key, leaf.value = compact(leaf.key[:keep]), compact(leaf.value[:keep])
            leaf.depth -= num_tokens
            leaf.shrunk = True
            self._queue(leaf)
            return
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.edge]
        leaf.parent = None
        for window in self.windows:
            window.forget(leaf)
        self._queue(parent)

    def discard(self, node: Node) -> None:
        """Frees the path to `node`, from its end on, as far as it is unlocked and has no other children. It serves for
        KV that must not be used again; whoever still holds a part discards that in turn."""
        while node.parent is not None and not node.children and node.lock_ref == 0:
            parent = node.parent
            self._evictions.drop(node)
            self._evictable -= node.key.size
            self.allocator.free(node.value)
            self._shrink(node, node.key.size)
            node = parent

    def remove(self, nodes: Sequence[Node]) -> None:
        """Frees nodes that are unlocked and have no descendants outside `nodes`. Nothing above them is freed."""
        for node in sorted(nodes, key=lambda n: -n.depth):
            parent = node.parent
            assert parent is not None and not node.children and not node.lock_ref, "a node to be removed is in use"
            parent.lock_ref += 1  # `discard` must stop here
            self.discard(node)
            parent.lock_ref -= 1
            self._queue(parent)

    def below(self, node: Node) -> list[Node]:
        """Returns the node and all its descendants."""
        nodes = [node]
        for n in nodes:
            nodes += n.children.values()
        return nodes

    def reset(self) -> None:
        """Frees every cached slot. Allowed only while no request holds a lock."""
        assert self._protected == 0, f"{self._protected} cached tokens are still in use"
        nodes = list(self.nodes())
        self.allocator.free(_concat([n.value for n in nodes]))
        for node in nodes:  # remembered matches must not point into the old tree
            node.parent = None
            for window in self.windows:
                window.drop(node.windows[window.index])
            if self.checkpoints is not None:
                self.checkpoints.drop(node)
        for window in self.windows:
            window.reset()
        self._start()

    def nodes(self) -> Iterator[Node]:
        """Yields every node but the root."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    # --- requests -----------------------------------------------------------------------------------------------------

    def commit(
        self,
        token_ids: Tokens,
        indices: Slots,
        node: Node,
        num_cached: int,
        namespace: str | None = None,
        windows: Sequence[Slots] = (),
    ) -> Commit:
        """Shares the computed tokens of a request that goes on.

        indices [>= len(token_ids)]: the slots of `token_ids` and perhaps of further positions; the first `num_cached`
        belong to the tree and are locked through `node`, where they end. Where the tree has got the same tokens from
        another request meanwhile, this request's duplicates are freed and the tree's slots take their place in the
        result. The lock moves to the result's node. `windows`: the request's slots in each window table, 0 where it has
        none any more.
        """
        indices = np.asarray(indices, np.int32)
        tokens = self._aligned(token_ids)
        if not self.enabled or tokens.size <= num_cached:
            return Commit(indices, node, num_cached, windows)
        self._clock += 1
        path = self.path(node)
        for n in path:
            self._use(n)
        deepest, passed = self._descend(node, tokens[num_cached:], namespace)
        shared = _concat([n.value for n in passed])
        if shared.size:
            self.allocator.free(indices[num_cached : num_cached + shared.size])
            indices = np.concatenate((indices[:num_cached], shared, indices[num_cached + shared.size :]))
        start = num_cached + shared.size
        if start < tokens.size:
            deepest = self._add_leaf(deepest, tokens[start:], indices[start : tokens.size], namespace)
            passed.append(deepest)
        windows = [self._share_window(passed, *pair, num_cached) for pair in zip(self.windows, windows, strict=True)]
        self.lock(deepest)
        self.unlock(node)
        self._shorten(deepest, len(path) + len(passed), deepest)
        return Commit(indices, deepest, int(tokens.size), windows)

    def share_windows(self, nodes: list[Node], windows: Sequence[Slots]) -> list[Slots]:
        """Gives the tree a request's window slots for the tokens of `nodes`, which begin at the root; works as `commit`
        does."""
        return [
            self._share_window(nodes, window, slots, 0) for window, slots in zip(self.windows, windows, strict=True)
        ]

    def _share_window(self, nodes: list[Node], window: WindowTable, slots: Slots, start: int) -> Slots:
        """Shares a window's slots between the tree and a request whose tokens from `start` on are those of `nodes`.
        Returns the request's slots."""
        slots = slots.copy()
        for node in nodes:
            part = slice(start, start + node.key.size)
            node.windows[window.index], slots[part] = window.share(node.windows[window.index], slots[part])
            window.queue(node)
            start = part.stop
        return slots

    # --- invariants ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises AssertionError if the tree is not consistent. Slow: for tests and idle time only."""
        evictable = protected = 0
        values: list[Slots] = []
        for node in self.nodes():
            self._check_node(node)
            values.append(node.value)
            if node.lock_ref:
                protected += node.key.size
            else:
                evictable += node.key.size
        kept = sum(n.key.size for n in self.nodes() if n.kept_until)
        assert kept == self._kept, f"{kept} tokens are kept, the count says {self._kept}"
        assert kept <= self.allocator.size // 2, f"{kept} tokens are kept of {self.allocator.size}"
        assert evictable == self._evictable, f"evictable size is {evictable}, the count says {self._evictable}"
        assert protected == self._protected, f"protected size is {protected}, the count says {self._protected}"
        slots = _concat(values)
        assert np.unique(slots).size == slots.size, "two nodes own the same slot"
        assert not self.allocator.is_free(slots).any(), "the tree owns slots that the allocator holds as free"
        self._evictions.check(self.nodes())

    def _check_node(self, node: Node) -> None:
        page_size = self.page_size
        assert node.key.size > 0 and node.key.size % page_size == 0, f"node of {node.key.size} tokens"
        assert node.key.size == node.value.size, f"{node.key.size} tokens with {node.value.size} slots"
        pages = node.value.reshape(-1, page_size)
        assert (pages[:, 0] % page_size == 0).all(), "a page does not start at a page boundary"
        assert (pages == pages[:, :1] + np.arange(page_size)).all(), "a page is not contiguous"
        first_page = node.key[:page_size].tobytes()
        named = isinstance(node.edge, tuple)
        assert (node.edge[1] if named else node.edge) == first_page, "a node hangs on a wrong edge"
        assert node.parent is not None and node.parent.children[node.edge] is node, "parent and child disagree"
        assert node.depth == node.parent.depth + node.key.size, "a node ends at another depth than it says"
        assert not node.kept_until or node.parent is self.root or node.parent.kept_until >= node.kept_until
        assert not named or node.parent is self.root, "a namespace below the first level"
        assert node.lock_ref >= sum(c.lock_ref for c in node.children.values()), "a locked node under a freer one"
        assert all(c.last_access <= node.last_access for c in node.children.values()), "a child newer than its parent"
        assert node.heap_entry or node.children or node.lock_ref, "a free leaf that eviction will never find"


def _concat(parts: list[Slots]) -> Slots:
    return np.concatenate(parts) if parts else EMPTY
