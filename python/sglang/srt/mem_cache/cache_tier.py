"""One memory in which cached prefixes lie (a tier), and copies of a prefix from one to the other. Host side only.

A tier is a prefix tree over its own slots, with its own windows and checkpoints: the GPU's belongs to `KVTable`, that
of main memory to `HostTier`. A transfer reserves what it reads and writes until it ends, so that no page is reused
while a copy from or to it is under way; only when it has ended well does the target's tree get what it brought.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sglang.srt.mem_cache.allocator import Slots
from sglang.srt.mem_cache.checkpoint_table import CheckpointTable
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.radix_node import EMPTY, Keys, Node
from sglang.srt.mem_cache.window_table import WindowTable

Pages = npt.NDArray[np.int64]
NO_PAGES: Pages = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class PageMoves:
    """Pages (of states: rows) of one pool to copy: `sources` [N] of one memory to `targets` [N] of the other."""

    sources: Pages
    targets: Pages

    def __len__(self) -> int:
        return len(self.targets)


NO_MOVES = PageMoves(NO_PAGES, NO_PAGES)


class CacheTier:
    """A tree with the tables of the same memory."""

    def __init__(
        self, tree: RadixCache, windows: Sequence[WindowTable] = (), checkpoints: CheckpointTable | None = None
    ) -> None:
        self.tree, self.windows, self.checkpoints = tree, tuple(windows), checkpoints

    @property
    def page_size(self) -> int:
        return self.tree.page_size

    def take(self, num_tokens: int) -> Slots | None:
        """Returns slots of whole pages; cached prefixes give way. None if that does not suffice."""
        allocator = self.tree.allocator
        self.tree.evict(num_tokens - allocator.available_size())
        slots = allocator.alloc([0], [num_tokens], [0])
        return None if slots is None else np.sort(slots)  # long runs are copied at once

    def prefix(self, keys: Keys, namespace: str | None) -> CachedPrefix:
        return CachedPrefix(self, self.tree.follow(keys, namespace))


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """What a tier has of a sequence: nodes from the root on."""

    tier: CacheTier
    nodes: list[Node]

    @property
    def length(self) -> int:
        return self.nodes[-1].depth if self.nodes else 0

    @property
    def last(self) -> Node:
        return self.nodes[-1] if self.nodes else self.tier.tree.root

    def slots(self, start: int, end: int) -> Slots:
        """The slots of the positions start .. end - 1, all of which it has."""
        parts = [n.value[max(0, start - _begin(n)) : end - _begin(n)] for n in self.nodes if _overlaps(n, start, end)]
        return np.concatenate(parts) if parts else EMPTY

    def window(self, index: int, start: int, end: int) -> Slots:
        """[end - start] slots of a window table; 0 for what it lacks."""
        slots = np.zeros(end - start, np.int32)
        for n in self.nodes:
            if _overlaps(n, start, end):
                part = n.windows[index][max(0, start - _begin(n)) : end - _begin(n)]
                first = max(start, _begin(n)) - start
                slots[first : first + part.size] = part
        return slots

    def state_at(self, depth: int) -> Node | None:
        """The node that ends there and has a checkpoint."""
        return next((n for n in self.nodes if n.depth == depth and n.checkpoint), None)


def _begin(node: Node) -> int:
    return node.depth - node.key.size


def _overlaps(node: Node, start: int, end: int) -> bool:
    return _begin(node) < end and node.depth > start


def resumable_end(one: CachedPrefix, other: CachedPrefix, longer_than: int) -> int:
    """Returns the greatest depth above `longer_than` behind which a request can go on, with every part from either of
    two tiers; 0: there is none. It is an end of a node of one of them."""
    length = max(one.length, other.length)
    depths = sorted({n.depth for n in (*one.nodes, *other.nodes) if longer_than < n.depth <= length}, reverse=True)
    return next((depth for depth in depths if _can_go_on(one, other, depth)), 0)


def _can_go_on(one: CachedPrefix, other: CachedPrefix, depth: int) -> bool:
    if one.tier.checkpoints is not None and one.state_at(depth) is None and other.state_at(depth) is None:
        return False
    for window in one.tier.windows:
        start = max(0, depth - (window.window - 1))
        if not (one.window(window.index, start, depth) | other.window(window.index, start, depth)).all():
            return False
    return True


@dataclass(slots=True, eq=False)
class Transfer:
    """A copy of what `target` lacks of a prefix, so that requests can go on behind its end there, too."""

    source: CacheTier
    target: CacheTier
    keys: Keys
    namespace: str | None
    source_node: Node
    target_node: Node
    """Ends of what the tiers had of the prefix, locked."""
    had: int = 0
    """Tokens that the target had."""
    slots: Slots = field(default_factory=lambda: EMPTY)
    """The target's slots of the tokens behind these."""
    windows: list[Slots] = field(default_factory=list)
    """[len(keys)] the target's new slots in each window table, 0 where it gets none."""
    used: list[tuple[WindowTable, Slots]] = field(default_factory=list)
    """Pages of windows that both tiers keep until the end."""
    pinned: int = 0
    reserved: int = 0
    """Rows of the state at the end of the prefix, in the source and in the target; 0: it is not copied."""
    moves: list[PageMoves] = field(default_factory=list)
    """Of the tokens, of each window, and where there are states, of these."""

    @classmethod
    def begin(cls, source: CachedPrefix, target: CachedPrefix, keys: Keys, namespace: str | None) -> Transfer | None:
        """Reserves what a copy of the prefix `keys` (whole pages) needs; None if there is no room. The tiers have
        every token of it between them."""
        source.tier.tree.lock(source.last)
        target.tier.tree.lock(target.last)
        transfer = cls(source.tier, target.tier, keys, namespace, source.last, target.last, target.length)
        if transfer._reserve_all(source, target):
            return transfer
        transfer.end(False)
        return None

    def _reserve_all(self, source: CachedPrefix, target: CachedPrefix) -> bool:
        """States and windows first: what gives way for them is small."""
        return self._reserve_state(source, target) and (
            self._reserve_windows(source, target) and self._reserve_tokens(source)
        )

    def _reserve_tokens(self, source: CachedPrefix) -> bool:
        missing = len(self.keys) - self.had
        if missing > 0:
            slots = self.target.take(missing)
            if slots is None:
                return False
            self.slots = slots
        moves = NO_MOVES
        if missing > 0:
            moves = self._moves(source.slots(self.had, len(self.keys)), self.slots)
        self.moves.insert(0, moves)
        return True

    def _moves(self, sources: Slots, targets: Slots) -> PageMoves:
        page = self.target.page_size
        return PageMoves(sources[::page].astype(np.int64) // page, targets[::page].astype(np.int64) // page)

    def _reserve_windows(self, source: CachedPrefix, target: CachedPrefix) -> bool:
        end = len(self.keys)
        for window, of_source in zip(self.target.windows, self.source.windows, strict=True):
            first = int(window.first_kept(np.array([end], np.int32))[0])
            there, here = source.window(window.index, first, end), target.window(window.index, first, end)
            copied = (here == 0) & (there != 0)
            if not (here | there)[-(window.window - 1) :].all():  # nobody could go on behind it
                copied[:] = False
            for table, kept in ((of_source, np.where(copied, there, 0)), (window, here)):
                table.use(kept)
                self.used.append((table, kept))
            self.windows.append(np.zeros(end, np.int32))
            slots = window.take(int(copied.sum()))
            if slots is None:
                return False
            self.windows[-1][first:][copied] = slots
            self.moves.append(self._moves(there[copied], slots))
        return True

    def _reserve_state(self, source: CachedPrefix, target: CachedPrefix) -> bool:
        """The moves of states come last, so `_reserve_windows` is to put its own before them."""
        if self.source.checkpoints is None or self.target.checkpoints is None:
            return True
        node = source.state_at(len(self.keys))
        if node is None or target.state_at(len(self.keys)) is not None:
            return True
        if not self.source.checkpoints.is_readable(node):
            return False
        self.pinned = self.source.checkpoints.pin(node)
        self.reserved = self.target.checkpoints.reserve()
        return self.reserved > 0

    def all_moves(self) -> list[PageMoves]:
        """Returns the moves of each pool: of tokens, of each window, and where there are states, of these."""
        if self.source.checkpoints is None:
            return self.moves
        rows = NO_MOVES
        if self.reserved:
            rows = PageMoves(np.array([self.pinned], np.int64), np.array([self.reserved], np.int64))
        return [*self.moves, rows]

    @property
    def num_tokens(self) -> int:
        return int(self.slots.size)

    @property
    def is_empty(self) -> bool:
        return not any(map(len, self.all_moves()))

    def end(self, ok: bool) -> None:
        """The copy has ended; what it brought is the target's if it ended well."""
        if ok:
            self._adopt()
        elif self.slots.size:
            self.target.tree.allocator.free(self.slots)
        for window, slots in zip(self.target.windows, self.windows, strict=False):  # fewer where there was no room
            window.disuse(slots)
        for window, slots in self.used:
            window.disuse(slots)
        if self.pinned and self.source.checkpoints is not None:
            self.source.checkpoints.unpin(self.pinned)
        if self.reserved and self.target.checkpoints is not None:
            self.target.checkpoints.settle(self.reserved, None)
        self.source.tree.unlock(self.source_node)
        self.target.tree.unlock(self.target_node)

    def _adopt(self) -> None:
        """Enter it in the target's tree. Where others have brought or computed the same meanwhile, theirs stays."""
        tree = self.target.tree
        indices = np.zeros(len(self.keys), np.int32)
        indices[len(indices) - self.slots.size :] = self.slots
        nothing = [np.zeros(len(self.keys), np.int32) for _ in self.windows]
        self.target_node = tree.commit(
            self.keys, indices, self.target_node, self.had, self.namespace, nothing
        ).node  # the lock has moved there
        nodes = tree.follow(self.keys, self.namespace)
        assert nodes[-1].depth == len(self.keys), "a locked prefix is gone"
        self.windows = tree.share_windows(nodes, self.windows)
        if self.reserved and self.target.checkpoints is not None:
            self.target.checkpoints.settle(self.reserved, nodes[-1])
            self.reserved = 0
