"""Puts the memory of a rank to sleep and wakes it, by tag: what is kept in main memory meanwhile, and what is lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sglang.srt.hardware.arch import free_memory_bytes
from sglang.srt.mem_cache.main_memory import map_memory, populate_memory, register
from sglang.srt.model_executor.memory_saver.arenas import Arenas
from sglang.srt.utils.engine_state import TAGS, WEIGHTS

logger = logging.getLogger(__name__)

RESERVE = 1 << 30
"""Bytes of main memory that a copy of the weights leaves free."""


class Part(NamedTuple):
    """Bytes `begin` to `end` of a segment."""

    segment: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A copy of parts of an arena, one behind the other in main memory."""

    parts: tuple[Part, ...]
    memory: torch.Tensor
    locked: bool
    """Whether it is page-locked, so that the GPU copies it at the bus's rate."""

    def close(self) -> None:
        """Unlocks the memory, which is then given back with its tensor."""
        if self.locked:
            torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())


def complement(sizes: Sequence[int], addresses: Sequence[int], lost: Iterable[tuple[int, int]]) -> tuple[Part, ...]:
    """Returns the parts of segments, given by size and address, that `lost` (addresses and bytes) leaves."""
    parts, ranges = [], sorted(lost)
    for index, (size, address) in enumerate(zip(sizes, addresses, strict=True)):
        begin = 0
        for start, count in ranges:
            first, last = start - address, start - address + count
            if last <= begin or first >= size:
                continue
            if first > begin:
                parts.append(Part(index, begin, first))
            begin = max(begin, min(last, size))
        if begin < size:
            parts.append(Part(index, begin, size))
    return tuple(parts)


class MemorySaver:
    """The sleeping memory of one rank. Its callers see to it that nothing runs."""

    def __init__(self, arenas: Arenas, on_gpu: bool) -> None:
        self.arenas, self._on_gpu = arenas, on_gpu
        self.changes_weights = False
        """Whether steps, or adapters, write into the arena of the weights: a copy is then made at each sleep."""
        self.from_files: Callable[[], Iterable[torch.Tensor]] = lambda: ()
        """Returns the tensors that can be read again from the model's files."""
        self.seconds: dict[str, float] = {}
        """Of the last sleep and the last wake, and of the copies in them."""
        self._copy: HostCopy | None = None
        self._copy_is_whole = False

    def region(self, tag: str) -> AbstractContextManager[None]:
        """Allocates in the arena of `tag` inside the block."""
        return self.arenas.region(tag)

    @property
    def graph_pool(self) -> Any:
        """Returns the pool that graphs are captured in."""
        return self.arenas.graph_pool

    @property
    def host_bytes(self) -> int:
        """Returns the bytes of main memory that the copy of the weights takes."""
        return 0 if self._copy is None else len(self._copy.memory)

    def weights_changed(self) -> None:
        """Notes that the weights were written, so that a copy of them is none any more."""
        self._drop_copy()

    def sizes(self) -> dict[str, int]:
        """Returns the bytes of each arena."""
        return {tag: self.arenas.size(tag) for tag in TAGS}

    def problem_of_copy(self) -> str:
        """Returns why main memory does not take a copy of the weights; "" if it does, or has one."""
        free = free_memory_bytes(None)
        wanted = 0 if self._copy is not None and self._copy_is_whole else self.arenas.size(WEIGHTS)
        if wanted + RESERVE <= free or not wanted:
            return ""
        return (
            f"a copy of the weights takes {wanted / 1e9:.1f} GB of main memory, of which {free / 1e9:.1f} GB are free"
        )

    def sleep(self, tags: Sequence[str], keep_weights: bool) -> bool:
        """Gives the memory of `tags` back. keep_weights: a copy of the weights stays in main memory; otherwise only of
        what the model's files do not hold. Returns whether all weights are kept."""
        started, kept = time.perf_counter(), True
        if WEIGHTS in tags:
            kept = self._save(keep_weights)
        for tag in tags:
            self.arenas.unmap(tag)
        self.seconds["sleep"] = time.perf_counter() - started
        return kept

    def missing(self, tags: Sequence[str]) -> tuple[int, int] | None:
        """Returns the bytes that waking `tags` takes and those that are free, if these are fewer; None: it fits."""
        free, needed = self.arenas.free_bytes(), sum(self.arenas.size(tag) for tag in tags)
        return None if free is None or free >= needed else (needed, free)

    def wake(self, tags: Sequence[str]) -> None:
        """Takes memory for `tags` again: the weights get their copy back, all else is zero. Raises MemoryError; then
        nothing is taken."""
        started, done = time.perf_counter(), list[str]()
        try:
            for tag in tags:
                self.arenas.map(tag)
                done.append(tag)
        except MemoryError:
            for tag in done:
                self.arenas.unmap(tag)
            raise
        with torch.inference_mode():
            for tag in tags:
                if tag == WEIGHTS and self._copy is not None:
                    self._restore(self._copy)
                else:
                    for segment in self.arenas.segments(tag):
                        segment.zero_()
        self._wait()
        self.seconds["wake"] = time.perf_counter() - started

    def sleep_again(self, tags: Sequence[str]) -> None:
        """Gives the memory back that `wake` has just taken: another rank has none."""
        for tag in tags:
            self.arenas.unmap(tag)

    # --- the copy -----------------------------------------------------------------------------------------------------

    def _save(self, whole: bool) -> bool:
        """Copies the weights, or what no file holds. Returns whether nothing is left out."""
        if whole and self._copy_is_whole and not self.changes_weights:
            return True
        started = time.perf_counter()
        segments = self.arenas.segments(WEIGHTS)
        lost = [] if whole else [(t.data_ptr(), t.nbytes) for t in self.from_files() if t.nbytes]
        parts = complement([len(s) for s in segments], [s.data_ptr() for s in segments], lost)
        if self._copy is None or self._copy.parts != parts:
            self._drop_copy()
            self._copy = self._allocate(parts)
        offset = 0
        with torch.inference_mode():
            for part in parts:
                size = part.end - part.begin
                source = segments[part.segment][part.begin : part.end]
                self._copy.memory[offset : offset + size].copy_(source, non_blocking=True)
                offset += size
        self._wait()
        self._copy_is_whole = not lost
        self.seconds["save"] = time.perf_counter() - started
        return self._copy_is_whole

    def _restore(self, copy: HostCopy) -> None:
        started, offset = time.perf_counter(), 0
        segments = self.arenas.segments(WEIGHTS)
        for part in copy.parts:
            size = part.end - part.begin
            target = segments[part.segment][part.begin : part.end]
            target.copy_(copy.memory[offset : offset + size], non_blocking=True)
            offset += size
        self._wait()
        self.seconds["restore"] = time.perf_counter() - started

    def _allocate(self, parts: tuple[Part, ...]) -> HostCopy:
        memory = map_memory(sum(part.end - part.begin for part in parts))
        if not self._on_gpu:
            return HostCopy(parts, memory, False)
        populate_memory(memory)
        code = register(memory) if len(memory) else 1
        if code and len(memory):
            logger.warning("Main memory for the weights is not page-locked (CUDA error %d): copies are slower", code)
        return HostCopy(parts, memory, not code)

    def _drop_copy(self) -> None:
        if self._copy is not None:
            self._copy.close()
        self._copy, self._copy_is_whole = None, False

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()


def create_saver(device: str) -> MemorySaver:
    """Returns the saver of this rank. Raises UserError where its memory cannot be given back."""
    if device == "cuda":
        from sglang.srt.model_executor.memory_saver.device_arenas import DeviceArenas

        return MemorySaver(DeviceArenas(), True)
    from sglang.srt.model_executor.memory_saver.host_arenas import HostArenas

    return MemorySaver(HostArenas(), False)
