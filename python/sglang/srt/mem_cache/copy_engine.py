"""Copies of cache pages between the GPU's pools and main memory, in a thread and on streams of their own.

One launch gathers the parts of many pages in a buffer on the device, and the copy engine moves the buffer over the bus
in large pieces while the next launch fills another buffer; loads go the other way. Where pages lie apart in main
memory, so that pieces would be small, the kernel reads or writes main memory itself. So it does in loads layer by
layer: of a layer main memory has small pieces, too, and a buffer of whole pages would bring all layers at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
import torch

from sglang.srt.mem_cache.cache_tier import CopyState, PageMoves
from sglang.srt.mem_cache.layerwise_load import LayerwiseLoad
from sglang.srt.mem_cache.page_pool import Bundle, PagePool
from sglang.srt.plan.host_cache import STAGING_BUFFERS, STAGING_BYTES
from sglang.srt.utils.device_arrays import event_on, to_device

logger = logging.getLogger(__name__)

SHORT_PIECE = 512 << 10
"""Bytes of a piece, on average, below which its launch takes longer than its copy."""
PACED_PIECE = 8 << 20
"""Bytes of a piece where copies are paced: 0.15 ms of the bus, which is a small part of a step."""
HUGE_PAGE = 2 << 20
ADVISE_HUGE = 14
"""MADV_HUGEPAGE of Linux."""
ADVISE_POPULATE = 23
"""MADV_POPULATE_WRITE."""
POPULATED_PIECE = 16 << 20
"""Bytes that the system allocates at a time; other threads wait so long for larger arrays of theirs."""


@dataclass(slots=True, eq=False)
class PendingCopy:
    """Implements CopyHandle."""

    moves: Sequence[PageMoves]
    to_host: bool
    steps_launched: torch.cuda.Event | None
    state: CopyState = CopyState.UNDER_WAY
    layers: LayerwiseLoad | None = None
    """Of a load that steps wait for layer by layer."""


class BusBudget:
    """Bytes per second that copies may move; None: as many as the bus can. Set by one thread and kept by another."""

    def __init__(self) -> None:
        self.rate: float | None = None
        self._free_at = 0.0

    def take(self, num_bytes: int) -> None:
        """Sleeps until so many bytes may begin to move."""
        rate, now = self.rate, time.monotonic()
        if not rate:
            return
        if self._free_at > now:
            time.sleep(self._free_at - now)
        self._free_at = max(now, self._free_at) + num_bytes / rate

    def rows(self, width: int, most: int) -> int:
        """Returns how many of `most` rows of `width` bytes are copied at once."""
        return most if not self.rate else max(1, min(most, PACED_PIECE // width))


class Buffer:
    """A staging buffer on the device. `used`: behind its last use."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        is_cuda = device.type == "cuda"
        self.filled = torch.cuda.Event() if is_cuda else None
        self.used = torch.cuda.Event(blocking=True) if is_cuda else None

    def wait(self) -> None:
        """Waits until it may be filled again, so that no more than the buffers hold is under way."""
        if self.used is not None:
            self.used.synchronize()


class Copier:
    """What a thread copies with: buffers in turn, and on a GPU a stream for launches and another one for the bus."""

    def __init__(
        self, device: torch.device, staging_bytes: int = STAGING_BYTES, budget: BusBudget | None = None
    ) -> None:
        self.device, self.budget = device, budget or BusBudget()
        self.launches = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.bus = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffers = [Buffer(staging_bytes, device) for _ in range(STAGING_BUFFERS)]
        self._turn = 0

    def warm_up(self, pools: Sequence[PagePool]) -> None:
        """Compiles what copies need, so that the first one does not wait for that. Copies nothing."""
        with _on(self.launches):
            nothing = torch.empty(0, dtype=torch.int64, device=self.device)
            for pool in pools:
                for bundle in pool.bundles:
                    rows = self._buffers[0].memory[: bundle.width].view(1, -1)
                    for to_rows in (True, False):
                        pool.copy(bundle, rows, nothing, nothing, to_rows)
                for bundle in pool.of_layer.values() if pool.locked else ():
                    pool.copy(bundle, pool.rows_of(bundle), nothing, nothing, False)

    def begin(self, steps_launched: torch.cuda.Event | None) -> None:
        """What follows waits for the steps that were launched before."""
        if self.launches is not None and steps_launched is not None:
            self.launches.wait_event(steps_launched)

    def finish(self) -> None:
        """Waits until everything has been copied. Raises what went wrong on the device."""
        for stream in (self.launches, self.bus):
            if stream is not None:
                ended = torch.cuda.Event(blocking=True)
                ended.record(stream)
                ended.synchronize()

    def copy(self, pool: PagePool, moves: PageMoves, to_host: bool, by_kernel: bool = False) -> None:
        """Begins to copy pages. by_kernel: without buffers."""
        on_device, in_host = (moves.sources, moves.targets) if to_host else (moves.targets, moves.sources)
        in_host = in_host - 1
        runs = 1 + int((np.diff(in_host) != 1).sum())
        short = pool.page_bytes * len(in_host) < SHORT_PIECE * runs
        with _on(self.launches):
            pages = to_device(on_device, self.device)
            if pool.locked and pool.by_kernel and (by_kernel or short):
                host_rows = to_device(in_host, self.device)
                for bundle in pool.bundles:
                    self._by_kernel(pool, bundle, pages, host_rows, to_host)
                return
            for bundle in pool.bundles:
                self._in_buffers(pool, bundle, pages, in_host, to_host)

    def load_layers(self, pools: Sequence[PagePool], moves: Sequence[PageMoves], arrivals: LayerwiseLoad) -> None:
        """Begins to load pages, one layer after the other. What has no layers comes first."""
        with _on(self.launches):
            loads = [
                (pool, to_device(of_pool.targets, self.device), to_device(of_pool.sources - 1, self.device))
                for pool, of_pool in zip(pools, moves, strict=True)
                if len(of_pool)
            ]
            for pool, of_pool in zip(pools, moves, strict=True):
                if len(of_pool) and not pool.of_layer:
                    self.copy(pool, of_pool, False)
            arrivals.arrived(0, self.launches)
            for index, layer in enumerate(arrivals.layers[1:], start=1):
                for pool, pages, host_rows in loads:
                    if layer in pool.of_layer:
                        bundle = pool.of_layer[layer]
                        pool.copy(bundle, pool.rows_of(bundle), host_rows, pages, False)
                arrivals.arrived(index, self.launches)

    def _by_kernel(
        self, pool: PagePool, bundle: Bundle, pages: torch.Tensor, host_rows: torch.Tensor, to_host: bool
    ) -> None:
        first = 0
        while first < len(pages):
            some = slice(first, first + self.budget.rows(bundle.width, len(pages)))
            self.budget.take(len(pages[some]) * bundle.width)
            pool.copy(bundle, pool.rows_of(bundle), host_rows[some], pages[some], to_host)
            first = some.stop

    def _in_buffers(
        self, pool: PagePool, bundle: Bundle, pages: torch.Tensor, in_host: np.ndarray, to_host: bool
    ) -> None:
        most = len(self._buffers[0].memory) // bundle.width
        row_ids = torch.arange(min(most, len(pages)), device=self.device)
        first = 0
        while first < len(pages):
            end = first + self.budget.rows(bundle.width, most)
            some, of_host = pages[first:end], in_host[first:end]
            first = end
            self.budget.take(len(some) * bundle.width)
            buffer = self._buffers[self._turn]
            self._turn = (self._turn + 1) % len(self._buffers)
            buffer.wait()
            staged = buffer.memory[: len(some) * bundle.width].view(len(some), bundle.width)
            pieces = _pieces(pool, bundle, staged, of_host)
            if to_host:
                pool.copy(bundle, staged, row_ids[: len(some)], some, True)
                _follow(self.bus, self.launches, buffer.filled)
            with _on(self.bus):
                for on_host, of_device in pieces:
                    target, source = (on_host, of_device) if to_host else (of_device, on_host)
                    target.copy_(source, non_blocking=True)
            if not to_host:
                _follow(self.launches, self.bus, buffer.filled)
                pool.copy(bundle, staged, row_ids[: len(some)], some, False)
            if buffer.used is not None:
                buffer.used.record(self.bus if to_host else self.launches)


def _on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def _follow(stream: torch.cuda.Stream | None, other: torch.cuda.Stream | None, event: torch.cuda.Event | None) -> None:
    """Lets a stream wait for what is on another one."""
    if stream is not None and other is not None and event is not None:
        event.record(other)
        stream.wait_event(event)


def _pieces(
    pool: PagePool, bundle: Bundle, staged: torch.Tensor, in_host: np.ndarray
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Contiguous memory of the host and of the buffer: pages that follow one another, or one by one, where a bundle is
    a part of a page."""
    whole = bundle.width == pool.page_bytes
    breaks = np.flatnonzero(np.diff(in_host) != 1) + 1 if whole else np.arange(1, len(in_host))
    starts = np.concatenate(([0], breaks))
    counts = np.diff(np.concatenate((starts, [len(in_host)])))
    host = pool.rows_of(bundle)
    return [
        (host[page : page + count], staged[row : row + count])
        for row, page, count in zip(starts.tolist(), in_host[starts].tolist(), counts.tolist(), strict=True)
    ]


class ThreadedCopies:
    """Implements CopyEngine. On a GPU the thread launches on its own streams, behind the steps launched before."""

    def __init__(
        self,
        pools: Sequence[PagePool],
        device: torch.device | str,
        num_threads: int = 1,
        by_kernel: bool = False,
    ) -> None:
        """by_kernel: the kernel moves everything between the two memories, and the copy engine nothing."""
        self.pools, self.by_kernel = list(pools), by_kernel
        self.page_bytes = [pool.page_bytes for pool in self.pools]
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:  # a thread begins with GPU 0 as the current one
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.ready = self.device.type != "cuda"
        self.broken = False
        """Main memory could not be prepared, and never takes copies."""
        self.budget = BusBudget()
        self.share = (0, 1)
        """Number of this rank and count of the ranks that have the same main memory: each saves a part."""
        self._queue: SimpleQueue[PendingCopy] = SimpleQueue()
        self._num_threads = num_threads
        self._started = False
        self._prepared_threads: list[threading.Event] = []
        self._populating: threading.Thread | None = None

    def populate(self) -> None:
        """Has the system allocate main memory in a thread, so that locking it has less to do. CUDA has no part in that,
        so graphs may be captured meanwhile."""
        if self.device.type == "cuda" and self._populating is None:
            self._populating = threading.Thread(target=populate, args=(self.pools,), name="main-memory", daemon=True)
            self._populating.start()

    def start(self) -> None:
        """Starts the threads, which page-lock main memory first. Not before graphs are captured: CUDA allows no other
        thread to lock memory meanwhile."""
        if not self._started:
            self._started = True
            self.populate()
            for _ in range(self._num_threads):
                self._prepared_threads.append(prepared := threading.Event())
                threading.Thread(target=self._work, args=(prepared,), name="cache-copies", daemon=True).start()

    def wait_prepared(self, seconds: float | None = None) -> bool:
        """Waits until the threads, where they are started, have page-locked main memory or failed. What the GPU is
        asked for meanwhile waits, too: seconds where there are tens of GB. Returns whether they are done."""
        return all(prepared.wait(seconds) for prepared in self._prepared_threads)

    def submit(self, moves: Sequence[PageMoves], to_host: bool) -> PendingCopy:
        pending = PendingCopy(moves, to_host, event_on(self.device))
        self._queue.put(pending)
        return pending

    @property
    def loads_layers(self) -> bool:
        """Returns whether loads may come layer by layer."""
        if self.device.type != "cuda":
            return True
        return all(pool.locked and pool.by_kernel for pool in self.pools)

    def submit_layers(self, moves: Sequence[PageMoves]) -> PendingCopy:
        """As `submit`, of a load for which steps wait layer by layer."""
        layers = sorted({layer for pool in self.pools for layer in pool.of_layer})
        pending = PendingCopy(moves, False, event_on(self.device))
        pending.layers = LayerwiseLoad(layers, self.device.type == "cuda")
        self._queue.put(pending)
        return pending

    def pace(self, rate: float | None) -> None:
        """Limits copies to so many bytes a second; None: they are not limited."""
        self.budget.rate = rate

    @torch.inference_mode()
    def _work(self, prepared: threading.Event) -> None:
        try:
            copier = self._prepared()
            self.ready = True
        except Exception:
            logger.exception("Main memory cannot keep prefixes; those that leave the GPU are computed again")
            self.ready, self.broken = False, True
            return
        finally:
            prepared.set()
        while True:
            pending = self._queue.get()
            pending.state = self._end(pending, copier)

    def _prepared(self) -> Copier:
        """Page-locks main memory, and returns what copies."""
        if self._populating is not None:
            self._populating.join()
            torch.cuda.set_device(self.device)
            page_lock(self.pools)
        copier = Copier(self.device, budget=self.budget)
        copier.warm_up(self.pools)
        return copier

    def _end(self, pending: PendingCopy, copier: Copier) -> CopyState:
        """Copies, and returns how that has ended; nothing is under way then, however it has."""
        state = CopyState.FAILED
        try:
            copier.begin(pending.steps_launched)
            self.run(pending, copier)
            state = CopyState.DONE
        except Exception:  # a failed copy costs computation, never the server
            logger.exception("A copy of cached prefixes failed; they are computed again")
        if pending.layers is not None:
            pending.layers.give_up()
        try:
            copier.finish()
        except Exception:
            logger.exception("A copy of cached prefixes failed on the device")
            state = CopyState.FAILED
        return state

    def run(self, pending: PendingCopy, copier: Copier) -> None:
        if pending.layers is not None:
            copier.load_layers(self.pools, pending.moves, pending.layers)
            return
        for pool, moves in zip(self.pools, pending.moves, strict=True):
            mine = part_of(moves, *self.share) if pending.to_host else moves
            if len(mine):
                copier.copy(pool, mine, pending.to_host, self.by_kernel)


def part_of(moves: PageMoves, rank: int, count: int) -> PageMoves:
    """Returns the moves of one of `count` ranks that share them out: a run of them."""
    mine = slice(len(moves) * rank // count, len(moves) * (rank + 1) // count)
    return PageMoves(moves.sources[mine], moves.targets[mine])


def populate(pools: Sequence[PagePool]) -> None:
    """Has the system allocate the pools' main memory, in huge pages where it has them."""
    for pool in pools:
        _use_huge_pages(pool.host)
        _populate(pool.host)


def page_lock(pools: Sequence[PagePool]) -> None:
    """Lets the GPU read and write main memory at the bus's rate. Where the system does not allow it, copies are slower.
    A pool is locked as a whole: CUDA refuses copies across two ranges that were locked apart."""
    for pool in pools:
        code = torch.cuda.cudart().cudaHostRegister(pool.host.data_ptr(), pool.host.numel(), 0)
        pool.locked = int(code) == 0
        if not pool.locked:
            logger.warning("Main memory for cached prefixes cannot be page-locked (CUDA error %s)", code)
            return


def _populate(memory: torch.Tensor) -> None:
    """Has the system allocate memory, near this thread's CPUs, a piece after the other: locking it at once would hold
    up every other thread that allocates meanwhile. Systems before Linux 5.14 leave it to the lock."""
    start, end = -(-memory.data_ptr() // HUGE_PAGE) * HUGE_PAGE, memory.data_ptr() + memory.numel()
    end = end // HUGE_PAGE * HUGE_PAGE
    if end <= start or sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    for first in range(start, end, POPULATED_PIECE):
        size = min(POPULATED_PIECE, end - first)
        if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), ADVISE_POPULATE):
            return


def _use_huge_pages(memory: torch.Tensor) -> None:
    """Asks the system for pages of 2 MiB, which are locked many times as fast; without them nothing else changes."""
    start = -(-memory.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    size = memory.data_ptr() + memory.numel() - start
    if size > 0 and sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), ADVISE_HUGE)
