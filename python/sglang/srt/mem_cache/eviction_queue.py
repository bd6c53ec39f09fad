"""Orders in which nodes of the prefix tree are evicted, and in which kept prefixes expire.

Both are heaps with stale entries: a node that has changed gets another entry, and the old one is skipped when it comes.
So a change costs the logarithm of the number of nodes, and no step sorts the tree.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from sglang.srt.mem_cache.radix_node import Node

MAX_STALE = 64
"""Stale entries that a heap may have beyond the number of valid ones; with more, it is rebuilt."""


class EvictionQueue:
    """Unlocked leaves, the least recently used first."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []
        self._entries = 0  # breaks ties, so that nodes are never compared
        self._num_stale = 0
        """Entries that are no node's `heap_entry`, of which those of evicted nodes are none."""

    def add(self, node: Node) -> None:
        """Adds a leaf, unless it has an entry."""
        if not node.heap_entry:
            self._entries += 1
            node.heap_entry = self._entries
            heapq.heappush(self._heap, (node.last_access, self._entries, node))

    def drop(self, node: Node) -> bool:
        """Removes a node. Returns whether the node was in the queue."""
        if not node.heap_entry:
            return False
        node.heap_entry = 0
        self._num_stale += 1
        if self._num_stale > MAX_STALE + len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if entry[2].heap_entry == entry[1]]
            heapq.heapify(self._heap)
            self._num_stale = 0
        return True

    def pop(self) -> Node | None:
        """Removes and returns the next node that can be evicted; None if there is none. Nodes that cannot are dropped:
        they are added again when they become unlocked leaves."""
        while self._heap:
            queued_at, entry, node = heapq.heappop(self._heap)
            if node.heap_entry != entry:
                self._num_stale -= 1
                continue
            node.heap_entry = 0
            if node.children or node.lock_ref:
                continue
            if node.last_access <= queued_at:
                return node
            self.add(node)
        return None

    def next_evicted(self, num_tokens: int, root: Node) -> list[Node]:
        """Returns the nodes that lose the next `num_tokens` tokens, in order, without those that have lost some
        already."""
        entries, nodes, gone = self._entries, list[Node](), set[Node]()
        heap = [self._at(0)] if self._heap else []
        """Of the queue only what can be next: two entries lie below each. At -1 are others."""
        while num_tokens > 0 and heap:
            queued_at, entry, place, node = heapq.heappop(heap)
            if place >= 0:
                for below in range(2 * place + 1, min(2 * place + 3, len(self._heap))):
                    heapq.heappush(heap, self._at(below))
                if node.heap_entry != entry:
                    continue
            if node in gone or node.lock_ref or any(child not in gone for child in node.children.values()):
                continue
            if node.last_access > queued_at:
                heapq.heappush(heap, (node.last_access, entry, -1, node))
                continue
            num_tokens -= node.key.size
            gone.add(node)
            if not node.shrunk:
                nodes.append(node)
            if node.parent is not None and node.parent is not root:
                entries += 1
                heapq.heappush(heap, (node.parent.last_access, entries, -1, node.parent))
        return nodes

    def _at(self, place: int) -> tuple[int, int, int, Node]:
        queued_at, entry, node = self._heap[place]
        return queued_at, entry, place, node

    def check(self, nodes: Iterable[Node]) -> None:
        """Raises AssertionError if the queue does not fit the `nodes` of the tree."""
        valid = {id(n) for _, entry, n in self._heap if n.heap_entry == entry}
        assert len(self._heap) - len(valid) <= self._num_stale, "entries of no node are not counted"
        assert valid == {id(n) for n in nodes if n.heap_entry}, "a node is not where it says in the eviction heap"


class RetentionQueue:
    """Nodes that are kept before others, the earliest expiry first. An ancestor is kept at least as long as its
    descendants; of those with the same time the deepest comes first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Node]] = []
        self._entries = 0
        self._max_stale = MAX_STALE

    def add(self, node: Node) -> None:
        """Adds a node; call it after each change of `kept_until`."""
        self._entries += 1
        heapq.heappush(self._heap, (node.kept_until, -node.depth, self._entries, node))
        if len(self._heap) > self._max_stale:
            self._heap = [entry for entry in self._heap if _counts(entry)]
            heapq.heapify(self._heap)
            self._max_stale = MAX_STALE + 2 * len(self._heap)

    def pop(self, now: float) -> Node | None:
        """Removes and returns a node whose time is not after `now`; None if there is none."""
        while self._heap and self._heap[0][0] <= now:
            entry = heapq.heappop(self._heap)
            if _counts(entry):
                return entry[3]
        return None


def _counts(entry: tuple[float, int, int, Node]) -> bool:
    until, _, _, node = entry
    return node.parent is not None and node.kept_until == until
