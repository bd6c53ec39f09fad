"""Rows for copies of recurrent states, each the state at the end of a node of the prefix tree.

The state of a request lies in the row of its request slot and stands for all tokens before it, so a request can go on
from a cached prefix only where a copy of the state was kept. The device makes the copies at the start of the next step.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from sglang.srt.mem_cache.radix_node import Node, NodesCallback

StateSlots = npt.NDArray[np.int64]

MAX_STALE = 64
"""Entries that the queue may have beyond two a node; with more, it is rebuilt."""


class CheckpointTable:
    """Rows first_row .. first_row + size - 1 of every state tensor. The row of the least recently used node is evicted
    first; on one path, that of the node nearest to the root.

    A decoding request may hold one of these rows, with its state at its last page boundary. The tree gets the row when
    the request ends. Requests hold at most half of the rows.
    """

    def __init__(self, first_row: int, size: int) -> None:
        self.size = size
        self._rows = range(first_row, first_row + size)
        self._free = list(reversed(self._rows))
        self._nodes: dict[int, Node] = {}
        self._queue: list[tuple[int, int, int, Node]] = []
        """A heap of these nodes by the time of last use and depth. An entry may be earlier than its node's time by now,
        or its node may have lost its row; neither is changed before it comes."""
        self._entries = 0  # breaks ties, so that nodes are never compared
        self._decoding: dict[int, tuple[int, int]] = {}
        """Request slot -> the row that it has, and how many tokens the state there stands for."""
        self._sources: dict[int, int] = {}
        """Row -> the row whose content, as it is before the next step, it gets."""
        self._pinned: dict[int, int] = {}
        """Rows that copies to other memories read -> how many do."""
        self._abandoned: set[int] = set()
        """Of these, the rows that nobody has any more: free when the last copy has ended."""
        self._reserved: set[int] = set()
        """Rows that a copy from another memory writes."""
        self.before_eviction: NodesCallback | None = None
        """Is told of a node that is about to lose its state."""

    def usage(self) -> dict[str, int]:
        """Returns the numbers of rows that are free, cached in the tree, held by decoding requests, and in total."""
        used = {"cached": len(self._nodes), "held": len(self._decoding)}
        return {"free": len(self._free), **used, "total": self.size}

    def save(self, slot: int, node: Node) -> None:
        """Keeps the state of a request whose launched steps end where `node` ends."""
        if not node.checkpoint and (row := self._take()):
            self._give(node, row)
            self._copy(slot, row)

    def keep(self, slot: int, length: int) -> None:
        """Keeps the state of a decoding request whose launched steps end at a page boundary. It replaces the state that
        was kept for this request before."""
        if slot not in self._decoding and len(self._decoding) >= self.size // 2:
            return
        row = self._decoding[slot][0] if slot in self._decoding else self._take()
        if not row:
            return
        self._decoding[slot] = row, length
        self._copy(slot, row)

    def end(self, slot: int, node: Node | None) -> None:
        """Takes back the row of a request that gives up its slot. `node`: the node where its tokens in the tree end."""
        row, length = self._decoding.pop(slot, (0, 0))
        if row and node is not None and node.depth == length and not node.checkpoint:
            self._give(node, row)
        elif row:
            self._free.append(row)

    def _take(self) -> int:
        """Returns a row that is free now; 0 if there is none."""
        if not self._free:
            node = self._pop_oldest()
            if node is not None:
                if self.before_eviction is not None:
                    self.before_eviction([node])
                self.drop(node)
        return self._free.pop() if self._free else 0

    def _give(self, node: Node, row: int) -> None:
        node.checkpoint = row
        self._nodes[row] = node
        self._push(node)

    def _push(self, node: Node) -> None:
        if len(self._queue) > 2 * len(self._nodes) + MAX_STALE:
            self._queue = [self._entry(cached) for cached in self._nodes.values()]
            heapq.heapify(self._queue)
        heapq.heappush(self._queue, self._entry(node))

    def _entry(self, node: Node) -> tuple[int, int, int, Node]:
        self._entries += 1
        return node.last_access, node.depth, self._entries, node

    def reinsert(self, node: Node) -> None:
        """Notes that the node's time of last use has become earlier."""
        if node.checkpoint:
            self._push(node)

    def _pop_oldest(self) -> Node | None:
        """Takes the least recently used node whose row no copy reads from the queue; None if there is none."""
        pinned, oldest = [], None
        while self._queue and oldest is None:
            entry = heapq.heappop(self._queue)
            queued_at, _, _, node = entry
            if not node.checkpoint:
                continue
            if node.last_access != queued_at:
                self._push(node)
            elif node.checkpoint in self._pinned:
                pinned.append(entry)
            else:
                oldest = node
        for entry in pinned:
            heapq.heappush(self._queue, entry)
        return oldest

    def restore(self, node: Node, slot: int) -> None:
        """Copies the state of `node` to the slot of a request that begins there."""
        self._copy(node.checkpoint, slot)

    def drop(self, node: Node) -> None:
        """Frees the row of a node, as soon as no copy reads it."""
        if node.checkpoint:
            del self._nodes[node.checkpoint]
            if node.checkpoint in self._pinned:
                self._abandoned.add(node.checkpoint)
            else:
                self._free.append(node.checkpoint)
            node.checkpoint = 0

    # --- copies between memories --------------------------------------------------------------------------------------

    def pin(self, node: Node) -> int:
        """Keeps the node's row from reuse until `unpin`, even if the node is evicted, because a copy reads it."""
        assert node.checkpoint, "a copy of a state that nobody has"
        self._pinned[node.checkpoint] = self._pinned.get(node.checkpoint, 0) + 1
        return node.checkpoint

    def is_readable(self, node: Node) -> bool:
        """Returns whether a copy may begin: the launched steps have written the row."""
        return node.checkpoint not in self._sources

    def unpin(self, row: int) -> None:
        """Ends one `pin`; frees the row if its node is gone and no other copy reads it."""
        self._pinned[row] -= 1
        if self._pinned[row]:
            return
        del self._pinned[row]
        if row in self._abandoned:
            self._abandoned.remove(row)
            self._free.append(row)

    def reserve(self) -> int:
        """Returns a row that a copy may write after the launched steps; 0 if there is none."""
        row = self._take()
        if row:
            self._reserved.add(row)
            self._sources.pop(row, None)  # a pending copy to this row belonged to a node that was evicted
        return row

    def assign(self, row: int, node: Node | None) -> None:
        """Gives a reserved row, whose copy has ended, to `node`, the state at whose end it holds; None frees it."""
        self._reserved.remove(row)
        if node is None or node.checkpoint:
            self._free.append(row)
        else:
            self._give(node, row)

    def _copy(self, source: int, target: int) -> None:
        """Queues a copy, with the result of copying one by one, though the device reads all sources before it
        writes."""
        self._sources[target] = self._sources.get(source, source)

    def take_copies(self) -> tuple[StateSlots, StateSlots]:
        """Returns the sources and targets, [N] each, of the pending copies, and forgets them."""
        sources, targets = list(self._sources.values()), list(self._sources)
        self._sources.clear()
        return np.array(sources, np.int64), np.array(targets, np.int64)

    def check(self, nodes: list[Node]) -> None:
        """Raises AssertionError if the table is inconsistent. Slow: for tests."""
        kept = {node.checkpoint: node for node in nodes if node.checkpoint}
        assert kept == self._nodes, "the tree has other checkpoints than the table says"
        assert len(kept) == sum(1 for node in nodes if node.checkpoint), "two nodes have the same checkpoint"
        decoding = [row for row, _ in self._decoding.values()]
        assert len(decoding) <= self.size // 2, "requests have more than half of the rows"
        assert sorted([*kept, *decoding, *self._abandoned, *self._reserved, *self._free]) == list(self._rows), (
            "a checkpoint's row is lost or used twice"
        )
