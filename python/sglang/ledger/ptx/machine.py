"""The state of blocks that are executed together: registers as arrays over all their threads, masks, memory.

A lane is a thread of one of the blocks. A register's array has an element for each lane, or one for all of them. `mask`
says which lanes execute the current instruction; None: all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sglang.ledger.ptx.counts import Counts
from sglang.ledger.ptx.memory import SHARED_BASE, BlockMemory, GlobalMemory
from sglang.ledger.ptx.shared_watch import SharedWatch
from sglang.ledger.ptx.types import Array


class AsyncCopies:
    """What `cp.async` has asked for (9.7.9.25): by lane in groups, which a wait completes."""

    def __init__(self, lanes: int) -> None:
        self.groups = np.zeros(lanes, dtype=np.int64)
        self.pending: list[tuple[Array, Array, Array, int, Array]] = []
        """Lanes, offsets in shared memory, values, bytes of a value, groups."""


def unwritten(size: int, dtype: Any) -> Array:
    """Returns what lanes find in a register that they have not written: all ones, a NaN, the last address."""
    return np.full(size, dtype == np.bool_ or np.iinfo(dtype).max, dtype=dtype)


class Machine:
    def __init__(
        self, slots: Sequence[Array | None], threads: int, blocks: Sequence[tuple[int, int, int]],
        memory: GlobalMemory, shared_bytes: int, local_bytes: int, word: int, first_block: int = 0,
        counts: Counts | None = None,
    ) -> None:  # fmt: skip
        self.registers: list[Array | None] = list(slots)
        self.threads, self.lanes = threads, threads * len(blocks)
        self.mask: Array | None = None
        self.counts = counts
        """What memory is asked for; None: nobody asked."""
        self.memory = memory
        lane = np.arange(self.lanes)
        self.block_of_lane, self.first_block = lane // threads, first_block
        self.shared = BlockMemory("shared memory", SHARED_BASE, shared_bytes, self.block_of_lane)
        self.watch = SharedWatch(self.shared.stride * len(blocks), word, threads, self.lanes)
        self.local = BlockMemory("local memory", 0, local_bytes, lane)
        self.local_written = np.zeros(max(self.local.stride * self.lanes, 1), dtype=bool)
        self.copies = AsyncCopies(self.lanes)
        self.all_lanes = lane
        self.choices = 0
        """Stores to shared memory in which threads of a block write one place in different roundings."""

    def count_global(self, addresses: Array, lanes: Array | None, size: int) -> None:
        """Counts an access to global memory, if somebody asked: `addresses` has one for each lane, or one for all."""
        if self.counts is None:
            return
        if addresses.size == 1 and lanes is None:
            lanes = self.all_lanes if self.mask is None else np.flatnonzero(self.mask)
            addresses = np.broadcast_to(addresses, lanes.shape)
        self.counts.global_access(addresses, self.all_lanes if lanes is None else lanes, size)

    def full(self, x: Array) -> Array:
        """Returns an element for each lane."""
        return x if x.size == self.lanes else np.broadcast_to(x, (self.lanes,))

    def write(self, slot: int, value: Array) -> None:
        """Writes a register in the lanes that execute."""
        if self.mask is None:
            self.registers[slot] = value
            return
        self.write_where(slot, value, self.mask)

    def write_where(self, slot: int, value: Array, mask: Array) -> None:
        """Writes a register in some lanes."""
        old = self.registers[slot]
        self.registers[slot] = np.where(mask, value, unwritten(1, value.dtype) if old is None else old)

    def active(self, guard: int | None, negated: bool) -> Array | None:
        """Returns which lanes execute an instruction with a guard; None: all."""
        if guard is None:
            return self.mask
        predicate = self.registers[guard]
        assert predicate is not None
        if negated:
            predicate = ~predicate
        if predicate.size == 1:
            return self.mask if predicate[0] else np.zeros(self.lanes, dtype=bool)
        if self.mask is not None:
            return predicate & self.mask
        return None if predicate.all() else predicate
