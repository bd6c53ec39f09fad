"""Watches shared memory for what hardware lets pass: reads of what nobody wrote, and races.

Two threads race if both touch a word, one of them writes, and no barrier is between. Threads of one warp may also be
kept apart by `bar.warp.sync`. What a warp reads or writes together (`ldmatrix`, `stmatrix`) is no single thread's: all
of its threads need a barrier. Of two writes none races that changes nothing. What `cp.async` copies is on its
way until the thread that asked for it has waited.

Of many blocks that are executed together some are watched, evenly spread: what a block does may depend on its number.
"""

from __future__ import annotations

import numpy as np

from sglang.ledger.ptx.problems import Hazard
from sglang.ledger.ptx.types import Array

MOST_WATCHED = 2048
"""Threads, if these are 8 blocks or more."""


class SharedWatch:
    """Who touched each word last, and when. A word is as large as the smallest access of the kernel."""

    def __init__(self, size: int, word: int, threads: int, lanes: int) -> None:
        self.word, self._threads = word, threads
        words = max(size // word, 1)
        self._writer = np.full(words, -1, dtype=np.int32)
        self._written = np.zeros(words, dtype=np.int32)
        self._written_in_warp = np.zeros(words, dtype=np.int32)
        self._by_warp = np.zeros(words, dtype=bool)
        """Whether a warp wrote it together."""
        self._reader = np.full(words, -1, dtype=np.int32)
        """The only lane of its warp that read it, since the warp's last barrier; -2: several lanes."""
        self._read_in_warp = np.zeros(words, dtype=np.int32)
        self._reader_warp = np.full(words, -1, dtype=np.int32)
        self._read = np.full(words, -1, dtype=np.int32)
        self._coming = np.zeros(words, dtype=bool)
        self._epoch = np.zeros(lanes // threads, dtype=np.int32)
        self._warp_epoch = np.zeros(lanes // 32, dtype=np.int32)
        self._any_coming = False
        self.touched = np.zeros(lanes // threads, dtype=bool)
        """By block: whether a thread has touched shared memory since the last barrier."""
        self._watched: Array | None = None
        blocks, most = lanes // threads, max(MOST_WATCHED // threads, 8)
        if blocks > most:
            chosen = np.zeros(blocks, dtype=bool)
            chosen[np.linspace(0, blocks - 1, most).astype(np.int64)] = True
            self._watched = np.repeat(chosen, threads)

    def barrier(self, block: int) -> None:
        """Notes that all threads of a block have met."""
        self._epoch[block] += 1
        self.touched[block] = False

    def warp_barrier(self, lanes: Array) -> None:
        """Notes that these threads have met those of their warp."""
        self._warp_epoch[np.unique(lanes // 32)] += 1

    def read(self, offsets: Array, size: int, lanes: Array, by_warp: bool = False) -> None:
        """Checks a read of `size` bytes by each lane; `by_warp`: for any lane of its warp."""
        for word, lane in self._words(offsets, size, lanes):
            writer = self._writer[word]
            if (writer < 0).any():
                raise Hazard("uninitialized", f"byte {self._byte(word[writer < 0])} of shared memory")
            if self._any_coming and self._coming[word].any():
                byte = self._byte(word[self._coming[word]])
                raise Hazard("race", f"byte {byte} of shared memory is read before the wait for its cp.async")
            epoch = self._epoch[lane // self._threads]
            warp = (lane // 32).astype(np.int32)
            unsynchronized = self._written[word] == epoch
            if not by_warp:
                unsynchronized &= (writer != lane) | self._by_warp[word]
            if unsynchronized.any():
                met = (writer // 32 == warp) & (self._written_in_warp[word] < self._warp_epoch[warp])
                self._complain(unsynchronized & ~met, word, lane, writer, "reads", "wrote")
            self._note_reader(word, lane, warp, epoch, by_warp)
            other = (self._read[word] == epoch) & (self._reader_warp[word] != warp)
            self._reader_warp[word] = np.where(other, np.int32(-2), warp)
            several = self._reader_warp[word] != np.where(other, np.int32(-2), warp)
            if several.any():
                self._reader_warp[word[several]] = -2
            self._read[word] = epoch

    def _note_reader(self, word: Array, lane: Array, warp: Array, epoch: Array, by_warp: bool) -> None:
        now = self._warp_epoch[warp]
        before = (self._read[word] == epoch) & (self._reader_warp[word] == warp) & (self._read_in_warp[word] == now)
        one = np.where(before & (self._reader[word] != lane) | by_warp, np.int32(-2), lane).astype(np.int32)
        self._reader[word] = one
        several = self._reader[word] != one
        if several.any():
            self._reader[word[several]] = -2
        self._read_in_warp[word] = now

    def write(
        self, offsets: Array, size: int, lanes: Array, changed: Array | None, coming: bool = False,
        by_warp: bool = False,
    ) -> None:  # fmt: skip
        """Checks a write by each lane, and notes it. `changed`: where it writes another value than is there."""
        if changed is not None and self._watched is not None:
            changed = changed[self._watched[lanes]]
        for word, lane in self._words(offsets, size, lanes):
            if self._any_coming and self._coming[word].any():
                byte = self._byte(word[self._coming[word]])
                raise Hazard("race", f"byte {byte} of shared memory is written before the wait for its cp.async")
            epoch = self._epoch[lane // self._threads]
            warp = (lane // 32).astype(np.int32)
            writer = self._writer[word]
            other = (writer >= 0) & ((writer != lane) | self._by_warp[word]) & (self._written[word] == epoch)
            if other.any():
                met = (writer // 32 == warp) & (self._written_in_warp[word] < self._warp_epoch[warp])
                other &= ~met
                self._complain(other if changed is None else other & changed, word, lane, writer, "writes", "wrote")
            within = (self._reader[word] != lane) & (self._read_in_warp[word] == self._warp_epoch[warp])
            read = (self._read[word] == epoch) & ((self._reader_warp[word] != warp) | within)
            if read.any():
                reader = self._reader_warp[word] * 32
                self._complain(read, word, lane, reader, "writes", "read")
            self._writer[word], self._written[word], self._by_warp[word] = lane, epoch, by_warp
            self._written_in_warp[word] = self._warp_epoch[warp]
            if coming or self._any_coming:
                self._coming[word] = coming
        self._any_coming = self._any_coming or coming

    def arrived(self, offsets: Array, size: int, lanes: Array) -> None:
        """Notes that what was copied to these bytes is there, for the threads that waited."""
        for word, lane in self._words(offsets, size, lanes):
            self._coming[word] = self._by_warp[word] = False
            self._writer[word] = lane
            self._written[word] = self._epoch[lane // self._threads]
            self._written_in_warp[word] = self._warp_epoch[lane // 32]

    def atomic(self, offsets: Array, size: int, lanes: Array) -> None:
        """Checks that what atomic operations read was written. They do not race with each other."""
        for word, _ in self._words(offsets, size, lanes):
            if (self._writer[word] < 0).any():
                raise Hazard("uninitialized", f"byte {self._byte(word[self._writer[word] < 0])} of shared memory")

    def _words(self, offsets: Array, size: int, lanes: Array) -> list[tuple[Array, Array]]:
        self.touched[lanes // self._threads] = True
        if self._watched is not None:
            some = self._watched[lanes]
            offsets, lanes = offsets[some], lanes[some]
            if offsets.size == 0:
                return []
        first = offsets // self.word
        return [(first + i, lanes) for i in range(max(size // self.word, 1))]

    def _byte(self, words: Array) -> int:
        return int(words[0]) * self.word

    def _complain(self, which: Array, word: Array, lane: Array, other: Array, does: str, did: str) -> None:
        if not which.any():
            return
        i = int(np.flatnonzero(which)[0])
        block, thread = divmod(int(lane[i]), self._threads)
        byte = int(word[i]) * self.word
        by = f"thread {int(other[i]) % self._threads}" if other[i] >= 0 else "threads of several warps"
        raise Hazard(
            "race", f"thread {thread} of block {block} {does} byte {byte} of shared memory, which {by} {did},"
            " without a barrier between"
        )  # fmt: skip
