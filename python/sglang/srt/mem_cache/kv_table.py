"""Requests' rows, the slot allocator and the prefix tree behind one interface. Host side only.

A slot of the pool is free (allocator), cached (tree), or held by one request; free + cached + held is the pool, always.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sglang.srt.mem_cache.allocator import Slots, TokenAllocator
from sglang.srt.mem_cache.checkpoint_table import CheckpointTable, StateSlots
from sglang.srt.mem_cache.radix_cache import Match, RadixCache
from sglang.srt.mem_cache.radix_node import EMPTY, Keys, Node
from sglang.srt.mem_cache.window_table import WindowTable
from sglang.srt.plan.pool_sizes import PoolSizes

Lengths = npt.NDArray[np.int32]
NO_SLOTS: StateSlots = np.empty(0, np.int64)
PAUSE_UNIT, PAUSE_LEAST = 64, 512
"""Multiple of tokens at which long prompts pause when pages have one token, and the fewest tokens to compute before a
pause. The next prompt of a conversation often differs from this one only in its last few tokens: the template's opening
of thoughts, or nothing."""


class CachedRequest(Protocol):
    """The fields of a request that the table reads and writes."""

    namespace: str | None
    slot: int
    """Its row; 0: none."""
    kv_len: int
    """Leading tokens whose cache entries are launched."""
    reserved_len: int
    """Leading positions that have a cache slot, if more than `kv_len`."""
    state_is_exact: bool
    """True if its recurrent states are those of `kv_len` tokens."""
    num_cached: int
    """The number of these tokens whose entries belong to the tree, locked through `node`."""
    node: Node | None
    """The node at which the cached prefix ends: locked while the request has a row; while it waits, as last matched."""

    def cache_keys(self, length: int) -> Keys:
        """Returns the cache's keys of the first `length` tokens."""

    def matchable_len(self) -> int:
        """Returns the number of leading tokens that may come from the cache."""


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """Writes on the device before the next step: entries of `req_to_token` as flat indices into all its tables (equal
    ones have equal values), and copies of state rows, which are all made at once."""

    index: npt.NDArray[np.int64]  # [N]
    value: npt.NDArray[np.int32]  # [N]
    state_sources: StateSlots  # [M] int64
    state_targets: StateSlots  # [M] int64


class KVTable:
    """Rows 1..max_requests; row 0 belongs to padding and stays zero, which is the padding slot.

    Sizes and slots are those of the caches that keep all tokens. Each window that layers have has a table of its own in
    `windows` (`plan.caches.row_tables`), whose pages are freed as requests grow beyond them.

    `rows` [max_requests + 1, context_len] int32 says where each position of a request lies. Steps bring the copy on the
    device up to date by `take_update`; but a decode step enters its new slots of this table itself.
    """

    def __init__(self, sizes: PoolSizes, prefix_caching: bool = True, next_tokens_read: int = 0) -> None:
        """next_tokens_read: how many following tokens an entry depends on too, as a draft model's entries do."""
        self.sizes = sizes
        self.page_size = sizes.page_size
        # What follows the last token of a match may differ. Where states end a match there is no earlier end; a draft
        # then reads some entries of other tokens, which may cost it a draft token.
        self._next_tokens_read = 0 if sizes.has_states else next_tokens_read
        self.rows = np.zeros((sizes.max_requests + 1, sizes.context_len), np.int32)
        self.allocator = TokenAllocator(sizes.tokens, sizes.page_size)
        self.windows = tuple(WindowTable(i, sizes) for i in range(len(sizes.windows)))
        self.checkpoints = CheckpointTable(sizes.max_requests + 1, sizes.checkpoints) if sizes.has_states else None
        self.tree = RadixCache(self.allocator, sizes.page_size, prefix_caching, self.windows, self.checkpoints)
        self._free_rows = list(range(sizes.max_requests, 0, -1))
        self._written: list[list[npt.NDArray[np.int64]]] = [[] for _ in range(1 + len(self.windows))]
        """Entries of `rows` and of each window's rows, as flat indices, that the device's tables lack."""

    # --- sizes in tokens ----------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Returns the tokens for which there are slots."""
        return self.allocator.size

    @property
    def max_request_len(self) -> int:
        """Returns the tokens to which a request may grow: a page may be partly filled, and the next one is taken
        early."""
        return min(self.sizes.context_len, self.size - 2 * self.page_size)

    def num_free_rows(self) -> int:
        """Returns how many more requests can be placed."""
        return len(self._free_rows)

    def available_size(self) -> int:
        """Returns the tokens that are free, or cached and used by nobody."""
        return self.allocator.available_size() + self.tree.evictable_size()

    def used_size(self) -> int:
        """Returns the number of slots that running requests use."""
        return self.size - self.available_size()

    def usage(self) -> dict[str, int]:
        """Returns the use of the pool; slots missing from the sum are held by requests."""
        return {"free": self.allocator.available_size(), "cached": self.tree.total_size(), "total": self.size}

    def ensure_free(self, num_tokens: int) -> bool:
        """Evicts cached prefixes until `num_tokens` slots (in whole pages) are free in every table, if that is
        possible."""
        short = num_tokens - self.allocator.available_size()
        if short > 0:
            self.tree.evict(short)
        enough = self.allocator.available_size() >= num_tokens
        for window in self.windows:
            short = num_tokens - window.allocator.available_size()
            if short > 0:
                window.evict(short)
            enough = enough and window.allocator.available_size() >= num_tokens
        return enough

    def can_grow(self, old_lens: Lengths, new_lens: Lengths, also: int) -> bool:
        """Makes room for requests that grow from `old_lens` to `new_lens` tokens, and for `also` tokens of another one.
        Returns whether there is room."""
        page = self.page_size
        return self.ensure_free(self._new_pages(old_lens, new_lens) * page + (also + page if also else 0))

    def chunk_end(self, begin: int, end: int) -> int:
        """Returns the position up to which the next step computes a prompt of `end` tokens, `begin` of which are
        computed. That is the end, or, where a state would be kept only there, the last whole page before its last
        token; a step of its own then computes the rest, which is less than a page. Where every token is a page, the end
        of a prompt has a state anyway, and only long computations are worth the extra step."""
        if self.checkpoints is None or not self.checkpoints.size or not self.tree.enabled:
            return end
        unit, minimum = (self.page_size, 1) if self.page_size > 1 else (PAUSE_UNIT, PAUSE_LEAST)
        last = (end - 1) // unit * unit
        return last if last - begin >= minimum else end

    def leave_windows(self, slots: npt.NDArray[np.int64], lens: Lengths) -> None:
        """Frees the pages that have left every window of requests with at least `lens` tokens computed."""
        for window in self.windows:
            window.leave(slots, lens)

    def _new_pages(self, old_lens: Lengths, new_lens: Lengths) -> int:
        page = self.page_size
        return int((new_lens - old_lens).sum() if page == 1 else (-(-new_lens // page) - -(-old_lens // page)).sum())

    # --- requests -----------------------------------------------------------------------------------------------------

    def match(self, req: CachedRequest) -> Match:
        """Returns the cached prefix of a waiting request. Its end is remembered, so matching again is cheap. Lock its
        node before anything is evicted."""
        result = self.tree.match_prefix(req.cache_keys(req.matchable_len()), req.namespace, req.node)
        if self._next_tokens_read and result.length:
            whole = max(0, result.length - self._next_tokens_read)
            known = result.node
            while known.depth > whole and known.parent is not None:
                known = known.parent
            result = self.tree.match_prefix(req.cache_keys(whole), req.namespace, known)
        req.node = result.node
        return result

    def lock(self, node: Node) -> None:
        """Keeps the prefix up to `node`, and the windows before its end, until `unlock` or until a request placed there
        is released."""
        self.tree.lock(node)
        for window in self.windows:
            window.use(self._window_before(node, window))

    def unlock(self, node: Node) -> None:
        """Ends one `lock` of the prefix."""
        for window in self.windows:
            window.drop_use(self._window_before(node, window))
        self.tree.unlock(node)

    def _window_before(self, node: Node, window: WindowTable) -> Slots:
        return window.tail(self.tree.path(node), node.depth)

    def place(self, req: CachedRequest, node: Node) -> None:
        """Gives a request a row that begins with the cached prefix up to `node`, which must be locked already."""
        cached = self.tree.slots_to(node)
        req.slot, req.node, req.state_is_exact = self._free_rows.pop(), node, True
        req.kv_len = req.num_cached = len(cached)
        self._write(req.slot, 0, cached)
        for window in self.windows:
            tail = self._window_before(node, window)
            window.start[req.slot] = first = node.depth - len(tail)
            self._write(req.slot, first, tail, window)
        if self.checkpoints is not None and node.checkpoint:
            self.checkpoints.restore(node, req.slot)

    def grow(self, slots: npt.NDArray[np.int64], old_lens: Lengths, new_lens: Lengths, num_decodes: int) -> Slots:
        """Allocates slots for the tokens old_lens[i] .. new_lens[i] - 1 of each request, one request after the other.
        The first `num_decodes` requests get one token each, which the step itself enters in the device's table."""
        self.ensure_free(self._new_pages(old_lens, new_lens) * self.page_size)
        last = self.rows[slots, np.maximum(old_lens - 1, 0)]
        locs = self.allocator.alloc(old_lens, new_lens, last)
        assert locs is not None, "cache slots were promised that are not there"
        self.rows[slots[:num_decodes], old_lens[:num_decodes]] = locs[:num_decodes]
        if self.checkpoints is not None and self.page_size > 1 and self.tree.enabled:
            for i in np.flatnonzero(old_lens[:num_decodes] % self.page_size == 0).tolist():
                self.checkpoints.keep(int(slots[i]), int(old_lens[i]))
        counts, others = new_lens - old_lens, slice(num_decodes, None)
        self._write_tokens(slots[others], old_lens[others], counts[others], locs[num_decodes:])
        for window in self.windows:
            self._write_tokens(slots, old_lens, counts, window.grow(slots, old_lens, new_lens), window)
        return locs

    def commit(self, req: CachedRequest) -> None:
        """Shares the computed tokens of a prompt (or a chunk of it) through the tree; its step must be launched."""
        assert req.node is not None
        before = self.rows[req.slot, : req.kv_len].copy()
        window_slots = [window.slots_of(req.slot, req.kv_len) for window in self.windows]
        tokens = req.cache_keys(req.kv_len)
        done = self.tree.commit(tokens, before, req.node, req.num_cached, req.namespace, window_slots)
        req.node, req.num_cached = done.node, done.num_cached
        self._move(req.slot, before, done.indices)
        for window, old, new in zip(self.windows, window_slots, done.windows, strict=True):
            self._move(req.slot, old, new, window)
        self.leave_windows(np.array([req.slot]), np.array([req.kv_len], np.int32))
        if self.checkpoints is not None and req.node.depth == req.kv_len > 0 and req.state_is_exact:
            self.checkpoints.save(req.slot, req.node)

    def _move(self, slot: int, before: Slots, after: Slots, window: WindowTable | None = None) -> None:
        """Replaces a request's slots, because the same tokens were cached meanwhile; the next step uses the new
        ones."""
        moved = np.flatnonzero(after != before)
        if len(moved):
            self._write(slot, int(moved[0]), after[moved[0] :], window)

    def release(self, req: CachedRequest, keep: bool = True) -> None:
        """Ends a request's stay. `keep`: its computed tokens go to the tree; otherwise they are freed and must not be
        used again."""
        assert req.node is not None
        if keep:
            self.commit(req)
        self.allocator.free(self.rows[req.slot, req.num_cached : max(req.kv_len, req.reserved_len)])
        for window in self.windows:
            window.release(req.slot, max(req.kv_len, req.reserved_len))
        if self.checkpoints is not None:
            self.checkpoints.end(req.slot, req.node if keep else None)
        self.tree.unlock(req.node)
        if not keep:
            self.tree.discard(req.node)
        self._free_rows.append(req.slot)
        req.kv_len, req.reserved_len, req.num_cached, req.node = 0, 0, 0, None
        req.slot = 0  # cleared after its counters, which may be stored in arrays indexed by slot

    def reset(self) -> None:
        """Forgets every cached prefix. Allowed only while no request has a row."""
        self.tree.reset()

    # --- the device's table -------------------------------------------------------------------------------------------

    def _write(self, slot: int, start: int, locs: Slots, window: WindowTable | None = None) -> None:
        if not len(locs):
            return
        rows, written = self._rows_of(window)
        rows[slot, start : start + len(locs)] = locs
        first = slot * rows.shape[1] + start
        written.append(np.arange(first, first + len(locs), dtype=np.int64))

    def _write_tokens(
        self,
        slots: npt.NDArray[np.int64],
        start: Lengths,
        counts: Lengths,
        locs: Slots,
        window: WindowTable | None = None,
    ) -> None:
        if not len(locs):
            return
        rows, written = self._rows_of(window)
        row = np.repeat(slots, counts)
        position = np.arange(len(locs)) - np.repeat(np.cumsum(counts) - counts - start, counts)
        rows[row, position] = locs
        written.append(row * rows.shape[1] + position)

    def _rows_of(self, window: WindowTable | None) -> tuple[Slots, list[npt.NDArray[np.int64]]]:
        """Returns a table, and the list of its entries that were written."""
        return (self.rows, self._written[0]) if window is None else (window.rows, self._written[1 + window.index])

    def take_update(self) -> TableUpdate | None:
        """Returns the writes that the next step must make on the device. An entry may come twice, with equal values:
        those that the tables have now."""
        sources, targets = (NO_SLOTS, NO_SLOTS) if self.checkpoints is None else self.checkpoints.take_copies()
        index, value = [], []
        for number, rows in enumerate((self.rows, *(window.rows for window in self.windows))):
            if written := self._written[number]:
                entries = np.concatenate(written)
                index.append(entries + number * rows.size)
                value.append(rows.reshape(-1)[entries])
                written.clear()
        if not index:
            return TableUpdate(NO_SLOTS, EMPTY, sources, targets) if len(targets) else None
        return TableUpdate(np.concatenate(index), np.concatenate(value), sources, targets)

    # --- invariants ---------------------------------------------------------------------------------------------------

    def check(self, requests: Iterable[CachedRequest] = ()) -> None:
        """Raises AssertionError if the tables are inconsistent. `requests`: all that may have a row. Slow: for
        tests."""
        self.tree.check()
        lens = {req.slot: max(req.kv_len, req.reserved_len) for req in requests if req.slot}
        for window in self.windows:
            window.check(list(self.tree.nodes()), lens)
        if self.checkpoints is not None:
            self.checkpoints.check(list(self.tree.nodes()))
        assert not self.rows[0].any(), "the padding row was written"
