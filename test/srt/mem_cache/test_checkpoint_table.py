"""CheckpointTable: whose row is evicted, and what finding it costs."""

from __future__ import annotations

import random

import numpy as np

from sglang.srt.mem_cache.checkpoint_table import MAX_STALE, CheckpointTable
from sglang.srt.mem_cache.radix_node import EMPTY, Node


def leaf(time: int, depth: int = 1) -> Node:
    return Node(np.zeros(depth, np.int64), EMPTY, None, b"", time)


def test_a_full_table_does_not_look_at_every_state() -> None:
    looked = 0

    class Watched(Node):
        """Counts how often its time is read."""

        @property
        def last_access(self) -> int:
            nonlocal looked
            looked += 1
            return self.time

        @last_access.setter
        def last_access(self, time: int) -> None:
            self.time = time

    table = CheckpointTable(1, 1000)
    for time in range(2000):
        table.save(5000, Watched(np.zeros(1, np.int64), EMPTY, None, b"", time))
    assert looked < 10 * 2000 and table.usage()["free"] == 0
    assert {node.time for node in table._nodes.values()} == set(range(1000, 2000))  # type: ignore[attr-defined]


def test_the_least_recently_used_state_goes_whatever_happened_to_the_others() -> None:
    chance, table, told = random.Random(0), CheckpointTable(1, 20), list[Node]()
    table.before_eviction = lambda nodes: told.extend(nodes)
    pinned = dict[int, Node]()
    for time in range(3000):
        cached = list(table._nodes.values())
        action = chance.random()
        if action < 0.3 and cached:
            chance.choice(cached).last_access = time
        elif action < 0.4 and cached:
            node = chance.choice(cached)
            node.last_access -= chance.randrange(50)
            table.reinsert(node)
        elif action < 0.5 and cached:
            table.drop(chance.choice(cached))
        elif action < 0.6 and cached and len(pinned) < 5:
            node = chance.choice(cached)
            if node.checkpoint not in pinned:
                pinned[table.pin(node)] = node
        elif action < 0.7 and pinned:
            row = chance.choice(list(pinned))
            del pinned[row]
            table.unpin(row)
        else:
            unpinned = [node for node in cached if node.checkpoint not in pinned]
            is_full = not table.usage()["free"]
            oldest = min(((n.last_access, n.depth) for n in unpinned), default=None) if is_full else None
            told.clear()
            table.save(5000, leaf(time, chance.randrange(1, 4)))
            assert [(node.last_access, node.depth) for node in told] == [oldest] * (oldest is not None)
        assert len(table._queue) <= 2 * 20 + MAX_STALE + 1
        table.check(list(table._nodes.values()))
