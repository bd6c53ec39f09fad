"""A tier (one memory in which cached prefixes lie), and copies of a prefix between two tiers. Host side only.

A tier is a prefix tree over its own slots, with its own windows and checkpoints: the GPU's belongs to `KVTable`, that
of main memory to `HostTier`. A transfer reserves what it reads and writes until it ends, so that no page is reused
during the copy; only after a successful end does the target's tree get what was copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from sglang.srt.mem_cache.allocator import Slots
from sglang.srt.mem_cache.checkpoint_table import CheckpointTable
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.radix_node import EMPTY, Keys, Node
from sglang.srt.mem_cache.window_table import WindowTable

Pages = npt.NDArray[np.int64]
NO_PAGES: Pages = np.empty(0, np.int64)


class CopyState(IntEnum):
    """State of a copy, ordered so that the minimum over the ranks is the common state."""

    UNDER_WAY = 0
    FAILED = 1
    DONE = 2


@dataclass(frozen=True, slots=True)
class PageMoves:
    """Pages (for states: rows) of one pool to copy: `sources` [N] of one memory to `targets` [N] of the other."""

    sources: Pages
    targets: Pages

    def __len__(self) -> int:
        return len(self.targets)


NO_MOVES = PageMoves(NO_PAGES, NO_PAGES)


class CacheTier:
    """The prefix tree of one memory with its window tables and checkpoint table."""

    def __init__(self, tree: RadixCache, windows: Sequence[WindowTable], checkpoints: CheckpointTable | None) -> None:
        self.tree, self.windows, self.checkpoints = tree, tuple(windows), checkpoints

    @property
    def page_size(self) -> int:
        """Returns the tokens of a page."""
        return self.tree.page_size

    def take(self, num_tokens: int) -> Slots | None:
        """Returns slots of whole pages, evicting cached prefixes if needed; None if that frees too few."""
        allocator = self.tree.allocator
        self.tree.evict(num_tokens - allocator.available_size())
        slots = allocator.alloc([0], [num_tokens], [0])
        return None if slots is None else np.sort(slots)  # long runs are copied at once

    def prefix(self, keys: Keys, namespace: str | None) -> CachedPrefix:
        """Returns the part of `keys` that the tier has, as nodes from the root on."""
        return CachedPrefix(self, self.tree.follow(keys, namespace))


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The leading part of a sequence that a tier has: nodes from the root on."""

    tier: CacheTier
    nodes: list[Node]

    @property
    def length(self) -> int:
        """Returns the tokens of the prefix."""
        return self.nodes[-1].depth if self.nodes else 0

    @property
    def last(self) -> Node:
        """Returns the node where the prefix ends; the root if it is empty."""
        return self.nodes[-1] if self.nodes else self.tier.tree.root

    def current(self) -> CachedPrefix:
        """Returns the same prefix with its current nodes, which may have been split since. Its end must be locked."""
        return CachedPrefix(self.tier, self.tier.tree.path(self.last)[::-1])

    def slots(self, start: int, end: int) -> Slots:
        """Returns the slots of the positions start .. end - 1, which the prefix must have."""
        parts = [n.value[max(0, start - _begin(n)) : end - _begin(n)] for n in self.nodes if _overlaps(n, start, end)]
        return np.concatenate(parts) if parts else EMPTY

    def window(self, index: int, start: int, end: int) -> Slots:
        """Returns [end - start] slots of a window table; 0 where the tier has none."""
        slots = np.zeros(end - start, np.int32)
        for n in self.nodes:
            if _overlaps(n, start, end):
                part = n.windows[index][max(0, start - _begin(n)) : end - _begin(n)]
                first = max(start, _begin(n)) - start
                slots[first : first + part.size] = part
        return slots

    def state_at(self, depth: int) -> Node | None:
        """Returns the node that ends at `depth` and has a checkpoint."""
        return next((n for n in self.nodes if n.depth == depth and n.checkpoint), None)


def _begin(node: Node) -> int:
    return node.depth - node.key.size


def _overlaps(node: Node, start: int, end: int) -> bool:
    return _begin(node) < end and node.depth > start


def resumable_end(one: CachedPrefix, other: CachedPrefix, longer_than: int) -> int:
    """Returns the greatest depth above `longer_than` from which a request can go on, taking each part from either of
    two tiers; 0 if there is none. A node of one of the tiers ends there."""
    ends = [n for n in (*one.nodes, *other.nodes) if n.depth > longer_than]
    if one.tier.checkpoints is not None:
        ends = [n for n in ends if n.checkpoint]
    depths = np.array(sorted({n.depth for n in ends}), np.int32)
    for window in one.tier.windows:
        if depths.size:
            depths = depths[_has_window(one, other, window, depths)]
    return int(depths.max(initial=0))


def _has_window(
    one: CachedPrefix, other: CachedPrefix, window: WindowTable, depths: npt.NDArray[np.int32]
) -> npt.NDArray[np.bool_]:
    """Returns for each of `depths` (ascending, at least one) whether the two have the window before it. Reads every
    node once."""
    starts = depths - window.seen_before(depths)
    first, end = int(starts.min()), int(depths[-1])
    missing = (one.window(window.index, first, end) | other.window(window.index, first, end)) == 0
    num_missing = np.concatenate(([0], np.cumsum(missing)))
    complete: npt.NDArray[np.bool_] = num_missing[depths - first] == num_missing[starts - first]
    return complete


@dataclass(slots=True, eq=False)
class Arrival:
    """Room reserved in a tier for the missing parts of a prefix, until they have been copied there."""

    tier: CacheTier
    keys: Keys
    namespace: str | None
    node: Node
    """End of what the tier had of the prefix, locked."""
    had: int
    """Tokens that the tier had."""
    slots: Slots = field(default_factory=lambda: EMPTY)
    """The tier's slots of the tokens behind these."""
    windows: list[Slots] = field(default_factory=list)
    """[len(keys)] the tier's new slots in each window table, 0 where it gets none."""
    used: list[tuple[WindowTable, Slots]] = field(default_factory=list)
    """Pages of windows that the tier has and keeps until the end."""
    row: int = 0
    """Row for the state at the end of the prefix; 0: none is copied."""
    adopted: bool = False
    """Whether the tree has it already, though the copy goes on."""
    base: Node | None = None
    """Where the adopted part begins, locked, so that it does not become one node with what was there before."""

    @classmethod
    def begin(cls, prefix: CachedPrefix, keys: Keys, namespace: str | None) -> Arrival:
        """Locks `prefix`, the part of `keys` (whole pages) that the tier has, and starts with nothing reserved."""
        prefix.tier.tree.lock(prefix.last)
        return cls(prefix.tier, keys, namespace, prefix.last, prefix.length)

    def take_tokens(self) -> bool:
        """Reserves slots for all tokens that the tier lacks. Returns whether there was room, as the other methods
        do."""
        missing = len(self.keys) - self.had
        slots = self.tier.take(missing) if missing > 0 else EMPTY
        if slots is not None:
            self.slots = slots
        return slots is not None

    def take_window(self, window: WindowTable, first: int, missing: npt.NDArray[np.bool_]) -> bool:
        """Reserves slots of a window for the positions from `first` on where `missing` is true. Call it for each window
        in order."""
        self.windows.append(np.zeros(len(self.keys), np.int32))
        slots = window.take(int(missing.sum()))
        if slots is not None:
            self.windows[-1][first:][missing] = slots
        return slots is not None

    def keep_window(self, window: WindowTable, slots: Slots) -> None:
        """Keeps the tier's own pages of a window in use until `end`."""
        window.use(slots)
        self.used.append((window, slots))

    def take_row(self) -> bool:
        """Reserves a checkpoint row for the state at the end of the prefix. Returns whether there was one."""
        assert self.tier.checkpoints is not None
        self.row = self.tier.checkpoints.reserve()
        return self.row > 0

    @property
    def can_be_revoked(self) -> bool:
        """Returns whether every copied entry belongs to tokens that the tier lacks."""
        return self.slots.size > 0 and not any(slots[: self.had].any() for slots in self.windows)

    def adopt(self) -> None:
        """Enters everything in the tier's tree before it has been copied. It stays locked until `end`, and its users
        must wait for the copy themselves."""
        row = self.row
        self.base = self.node
        self.tier.tree.lock(self.base)
        self._adopt()
        self.adopted = True
        if row and self.tier.checkpoints is not None:
            nodes = self.tier.tree.path(self.node)
            self.row = self.tier.checkpoints.pin(nodes[0]) if nodes[0].checkpoint == row else 0

    def _release_adopted(self) -> None:
        if self.row and self.tier.checkpoints is not None:
            self.tier.checkpoints.unpin(self.row)
        self.row = 0
        if self.base is not None:
            self.tier.tree.unlock(self.base)

    def adopted_nodes(self) -> list[Node]:
        """Returns the nodes that `adopt` added, and all that were added below them since."""
        nodes = [n for n in self.tier.tree.path(self.node) if n.depth > self.had]
        return self.tier.tree.below(nodes[-1]) if nodes else []

    def revoke(self) -> None:
        """Removes adopted nodes from the tree: their copy failed, and nobody uses them any more."""
        wrong = self.adopted_nodes()
        self.end(len(self.keys))
        self.tier.tree.remove(wrong)

    def end(self, length: int) -> None:
        """Commits the first `length` tokens, which were copied; 0 after a failure. Windows and the state count only if
        `length` is the whole prefix."""
        if self.adopted:
            self._release_adopted()
        elif length == len(self.keys):
            self._adopt()
        else:
            self._adopt_beginning(max(length, self.had))
        for window, slots in zip(self.tier.windows, self.windows, strict=False):  # fewer after a lack of room
            window.drop_use(slots)
        for window, slots in self.used:
            window.drop_use(slots)
        if self.row and self.tier.checkpoints is not None:
            self.tier.checkpoints.assign(self.row, None)
        self.tier.tree.unlock(self.node)

    def _adopt_beginning(self, length: int) -> None:
        self._commit(length)
        rest = self.slots[length - self.had :]
        if rest.size:
            self.tier.tree.allocator.free(rest)

    def _commit(self, length: int) -> None:
        """Enters tokens in the tier's tree. Where others have added the same tokens meanwhile, their slots stay."""
        num_new = min(length - self.had, self.slots.size)
        if num_new <= 0:
            return
        indices = np.zeros(length, np.int32)
        indices[length - num_new :] = self.slots[:num_new]
        nothing = [np.zeros(length, np.int32) for _ in self.tier.windows]
        committed = self.tier.tree.commit(self.keys[:length], indices, self.node, self.had, self.namespace, nothing)
        self.node = committed.node  # the lock has moved there

    def _adopt(self) -> None:
        self._commit(len(self.keys))
        tree = self.tier.tree
        nodes = tree.follow(self.keys, self.namespace)
        assert nodes[-1].depth == len(self.keys), "a locked prefix is gone"
        self.windows = tree.share_windows(nodes, self.windows)
        if self.row and self.tier.checkpoints is not None:
            self.tier.checkpoints.assign(self.row, nodes[-1])
            self.row = 0


@dataclass(slots=True, eq=False)
class PinnedPrefix:
    """The part of a prefix that is being copied from a tier, which stays pinned there until the copy has ended."""

    tier: CacheTier
    node: Node
    """End of what the tier has of the prefix, locked."""
    used: list[tuple[WindowTable, Slots]] = field(default_factory=list)
    row: int = 0
    """Row of the state at the end of the prefix; 0: it is not copied."""

    @classmethod
    def begin(cls, prefix: CachedPrefix) -> PinnedPrefix:
        """Locks a prefix of a tier."""
        prefix.tier.tree.lock(prefix.last)
        return cls(prefix.tier, prefix.last)

    def keep_window(self, window: WindowTable, slots: Slots) -> None:
        """Keeps pages of a window in use until `end`."""
        window.use(slots)
        self.used.append((window, slots))

    def keep_state(self, node: Node) -> bool:
        """Pins the state at a node. Returns False if it may not be read yet."""
        checkpoints = self.tier.checkpoints
        assert checkpoints is not None
        if not checkpoints.is_readable(node):
            return False
        self.row = checkpoints.pin(node)
        return True

    def end(self) -> None:
        """Releases everything that was pinned."""
        for window, slots in self.used:
            window.drop_use(slots)
        if self.row and self.tier.checkpoints is not None:
            self.tier.checkpoints.unpin(self.row)
        self.tier.tree.unlock(self.node)


@dataclass(slots=True, eq=False)
class Transfer:
    """A copy of the parts of a prefix that one tier has and another lacks, so that requests can go on from its end in
    both."""

    departure: PinnedPrefix
    arrival: Arrival
    moves: list[PageMoves] = field(default_factory=list)
    """Moves of the tokens, and of each window."""

    @classmethod
    def begin(cls, source: CachedPrefix, target: CachedPrefix, keys: Keys, namespace: str | None) -> Transfer | None:
        """Reserves what a copy of the prefix `keys` (whole pages) needs; returns None if there is no room. Each of its
        tokens must be in one of the two tiers."""
        transfer = cls(PinnedPrefix.begin(source), Arrival.begin(target, keys, namespace))
        if transfer._reserve_all(source, target):
            return transfer
        transfer.end(False)
        return None

    @property
    def keys(self) -> Keys:
        """Returns the keys of the prefix that is copied."""
        return self.arrival.keys

    @property
    def namespace(self) -> str | None:
        """Returns the namespace of the prefix (`extra_key` of its requests)."""
        return self.arrival.namespace

    def _reserve_all(self, source: CachedPrefix, target: CachedPrefix) -> bool:
        """Reserves states and windows first, because little is evicted for them. Making room in the target may write
        back what is evicted there, and so split nodes of the source."""
        return self._reserve_state(source, target) and (
            self._reserve_windows(source, target) and self._reserve_tokens(source)
        )

    def _reserve_tokens(self, source: CachedPrefix) -> bool:
        arrival, moves = self.arrival, NO_MOVES
        if not arrival.take_tokens():
            return False
        if arrival.slots.size:
            moves = self._moves(source.current().slots(arrival.had, len(self.keys)), arrival.slots)
        self.moves.insert(0, moves)
        return True

    def _moves(self, sources: Slots, targets: Slots) -> PageMoves:
        page = self.arrival.tier.page_size
        return PageMoves(pages_of(sources, page), pages_of(targets, page))

    def _reserve_windows(self, source: CachedPrefix, target: CachedPrefix) -> bool:
        end = len(self.keys)
        for window, of_source in zip(target.tier.windows, source.tier.windows, strict=True):
            first = int(window.first_kept(np.array([end], np.int32))[0])
            there, here = source.current().window(window.index, first, end), target.window(window.index, first, end)
            copied = (here == 0) & (there != 0)
            seen = int(window.seen_before(np.array(end, np.int32)))
            if not (here | there)[len(here) - seen :].all():  # a request could not go on from there
                copied[:] = False
            self.departure.keep_window(of_source, np.where(copied, there, 0))
            self.arrival.keep_window(window, here)
            if not self.arrival.take_window(window, first, copied):
                return False
            self.moves.append(self._moves(there[copied], self.arrival.windows[-1][first:][copied]))
        return True

    def _reserve_state(self, source: CachedPrefix, target: CachedPrefix) -> bool:
        if source.tier.checkpoints is None:
            return True
        node = source.state_at(len(self.keys))
        if node is None or target.state_at(len(self.keys)) is not None:
            return True
        return self.departure.keep_state(node) and self.arrival.take_row()

    def all_moves(self) -> list[PageMoves]:
        """Returns the moves of each pool: tokens, each window, and states if the model has them."""
        if self.departure.tier.checkpoints is None:
            return self.moves
        rows = NO_MOVES
        if self.arrival.row:
            rows = PageMoves(np.array([self.departure.row], np.int64), np.array([self.arrival.row], np.int64))
        return [*self.moves, rows]

    @property
    def num_tokens(self) -> int:
        """Returns the tokens that are copied."""
        return int(self.arrival.slots.size)

    @property
    def is_empty(self) -> bool:
        """Returns whether there is nothing to copy."""
        return not any(map(len, self.all_moves()))

    def end(self, ok: bool) -> None:
        """Ends the transfer. `ok`: the copy succeeded, so the target's tree gets the copied entries; otherwise they are
        freed."""
        self.arrival.end(len(self.keys) if ok else 0)
        self.departure.end()


def pages_of(slots: Slots, page_size: int) -> Pages:
    """Returns the page of each whole page of `slots`; 0 for slots that are 0."""
    return slots[::page_size].astype(np.int64) // page_size


def common_length(one: Keys, other: Keys) -> int:
    """Returns the number of leading tokens that two sequences have in common."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length


def namespace_of(nodes: Sequence[Node]) -> str | None:
    """Returns the namespace of a prefix, given as its nodes from the root on (at least one)."""
    edge = nodes[0].edge
    return edge[0] if isinstance(edge, tuple) else None
