"""Copies of cache pages between the GPU's pools and main memory, in a thread and on streams of their own.

To save, one launch gathers the parts of many pages in a buffer on the device, and the copy engine moves the buffer over
the bus in large pieces while the next launch fills another buffer; loads go the other way. Where pages are scattered in
main memory, so that pieces would be small, the kernel reads or writes main memory itself. It also does so in loads
layer by layer: one layer's pieces are small in main memory, and a buffer of whole pages would bring all layers at once.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
import torch

from sglang.srt.mem_cache.cache_tier import CopyState, PageMoves
from sglang.srt.mem_cache.layerwise_load import LayerwiseLoad
from sglang.srt.mem_cache.main_memory import populate_memory, register, use_huge_pages
from sglang.srt.mem_cache.page_pool import Bundle, PagePool
from sglang.srt.plan.host_cache import STAGING_BUFFERS, STAGING_BYTES
from sglang.srt.utils.device_arrays import event_on, to_device

logger = logging.getLogger(__name__)

SHORT_PIECE = 512 << 10
"""Average bytes of a piece below which its launch takes longer than its copy."""
PACED_PIECE = 8 << 20
"""Bytes of a piece where copies are paced: 0.15 ms of the bus, which is a small part of a step."""


@dataclass(slots=True, eq=False)
class PendingCopy:
    """A copy that a thread makes. Implements CopyHandle."""

    moves: Sequence[PageMoves]
    to_host: bool
    steps_launched: torch.cuda.Event | None
    state: CopyState = CopyState.UNDER_WAY
    layers: LayerwiseLoad | None = None
    """Set for a load that steps wait for layer by layer."""


class BusBudget:
    """Limit of the bytes per second that copies move; None: no limit. One thread sets it and another one obeys it."""

    def __init__(self) -> None:
        self.rate: float | None = None
        self._free_at = 0.0

    def take(self, num_bytes: int) -> None:
        """Sleeps until `num_bytes` may begin to move."""
        rate, now = self.rate, time.monotonic()
        if not rate:
            return
        if self._free_at > now:
            time.sleep(self._free_at - now)
        self._free_at = max(now, self._free_at) + num_bytes / rate

    def rows(self, width: int, maximum: int) -> int:
        """Returns how many of `maximum` rows of `width` bytes to copy at once."""
        return maximum if not self.rate else max(1, min(maximum, PACED_PIECE // width))


class Buffer:
    """A staging buffer on the device. `used` is the event after its last use."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        is_cuda = device.type == "cuda"
        self.filled = torch.cuda.Event() if is_cuda else None
        self.used = torch.cuda.Event(blocking=True) if is_cuda else None

    def wait(self) -> None:
        """Waits until the buffer may be filled again; this bounds the bytes under way to those of all buffers."""
        if self.used is not None:
            self.used.synchronize()


class Copier:
    """The resources of a copying thread: buffers used in turn, and on a GPU one stream for launches and one for the
    bus."""

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
                for bundle in pool.by_layer.values() if pool.locked else ():
                    pool.copy(bundle, pool.rows_of(bundle), nothing, nothing, False)

    def begin(self, steps_launched: torch.cuda.Event | None) -> None:
        """Makes the following copies wait for the steps that were launched before."""
        if self.launches is not None and steps_launched is not None:
            self.launches.wait_event(steps_launched)

    def finish(self) -> None:
        """Waits until everything has been copied. Raises the device's error, if any."""
        for stream in (self.launches, self.bus):
            if stream is not None:
                ended = torch.cuda.Event(blocking=True)
                ended.record(stream)
                ended.synchronize()

    def copy(self, pool: PagePool, moves: PageMoves, to_host: bool, by_kernel: bool = False) -> None:
        """Begins to copy pages. by_kernel: the kernel accesses main memory itself, without buffers."""
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
        """Begins to load pages, one layer after the other. Entries that belong to no layer come first."""
        with _on(self.launches):
            loads = [
                (pool, to_device(of_pool.targets, self.device), to_device(of_pool.sources - 1, self.device))
                for pool, of_pool in zip(pools, moves, strict=True)
                if len(of_pool)
            ]
            for pool, of_pool in zip(pools, moves, strict=True):
                if len(of_pool) and not pool.by_layer:
                    self.copy(pool, of_pool, False)
            arrivals.arrived(0, self.launches)
            for index, layer in enumerate(arrivals.layers[1:], start=1):
                for pool, pages, host_rows in loads:
                    if layer in pool.by_layer:
                        bundle = pool.by_layer[layer]
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
        maximum = len(self._buffers[0].memory) // bundle.width
        row_ids = torch.arange(min(maximum, len(pages)), device=self.device)
        first = 0
        while first < len(pages):
            end = first + self.budget.rows(bundle.width, maximum)
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
    """Makes a stream wait for the work on another one."""
    if stream is not None and other is not None and event is not None:
        event.record(other)
        stream.wait_event(event)


def _pieces(
    pool: PagePool, bundle: Bundle, staged: torch.Tensor, in_host: np.ndarray
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns contiguous pieces of host memory with their parts of the buffer: runs of adjacent pages, or single pages
    where a bundle is only a part of a page."""
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
    """Copies in threads. Implements CopyEngine. On a GPU each thread launches on its own streams, after the steps
    launched before."""

    def __init__(
        self,
        pools: Sequence[PagePool],
        device: torch.device | str,
        num_threads: int = 1,
        by_kernel: bool = False,
    ) -> None:
        """by_kernel: the kernel makes all copies between the two memories, and the copy engine none."""
        self.pools, self.by_kernel = list(pools), by_kernel
        self.page_bytes = [pool.page_bytes for pool in self.pools]
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:  # GPU 0 is current in a new thread
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
        """Has the system allocate main memory in a thread, so that locking it is faster later. CUDA takes no part in
        it, so graphs may be captured meanwhile."""
        if self.device.type == "cuda" and self._populating is None:
            self._populating = threading.Thread(target=populate, args=(self.pools,), name="main-memory", daemon=True)
            self._populating.start()

    def start(self) -> None:
        """Starts the threads, which page-lock main memory first. Call it after CUDA graph capture, during which CUDA
        does not allow another thread to lock memory."""
        if not self._started:
            self._started = True
            self.populate()
            for _ in range(self._num_threads):
                self._prepared_threads.append(prepared := threading.Event())
                threading.Thread(target=self._work, args=(prepared,), name="cache-copies", daemon=True).start()

    def wait_prepared(self, seconds: float | None = None) -> bool:
        """Waits until all started threads have page-locked main memory or failed. GPU calls block meanwhile, for
        seconds if there are tens of GB. Returns whether they are done."""
        return all(prepared.wait(seconds) for prepared in self._prepared_threads)

    def submit(self, moves: Sequence[PageMoves], to_host: bool) -> PendingCopy:
        """Queues a copy and returns its handle."""
        pending = PendingCopy(moves, to_host, event_on(self.device))
        self._queue.put(pending)
        return pending

    @property
    def loads_layers(self) -> bool:
        """Returns whether loads can be made layer by layer."""
        if self.device.type != "cuda":
            return True
        return all(pool.locked and pool.by_kernel for pool in self.pools)

    def submit_layers(self, moves: Sequence[PageMoves]) -> PendingCopy:
        """Queues a load that steps wait for layer by layer, and returns its handle."""
        layers = sorted({layer for pool in self.pools for layer in pool.by_layer})
        pending = PendingCopy(moves, False, event_on(self.device))
        pending.layers = LayerwiseLoad(layers, self.device.type == "cuda")
        self._queue.put(pending)
        return pending

    def pace(self, rate: float | None) -> None:
        """Limits copies to `rate` bytes a second; None: no limit."""
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
        """Page-locks main memory and returns the thread's copier."""
        if self._populating is not None:
            self._populating.join()
            torch.cuda.set_device(self.device)
            page_lock(self.pools)
        copier = Copier(self.device, budget=self.budget)
        copier.warm_up(self.pools)
        return copier

    def _end(self, pending: PendingCopy, copier: Copier) -> CopyState:
        """Makes a copy and returns its final state; nothing of it is under way then, whether it succeeded or not."""
        state = CopyState.FAILED
        try:
            copier.begin(pending.steps_launched)
            self.run(pending, copier)
            state = CopyState.DONE
        except Exception:  # a failed copy must not stop the server: its tokens are computed instead
            logger.exception("A copy of cached prefixes failed; they are computed again")
        if pending.layers is not None:
            pending.layers.end_waits()
        try:
            copier.finish()
        except Exception:
            logger.exception("A copy of cached prefixes failed on the device")
            state = CopyState.FAILED
        return state

    def run(self, pending: PendingCopy, copier: Copier) -> None:
        """Makes a copy and waits for it. Raises the device's error, if any."""
        if pending.layers is not None:
            copier.load_layers(self.pools, pending.moves, pending.layers)
            return
        for pool, moves in zip(self.pools, pending.moves, strict=True):
            mine = part_of(moves, *self.share) if pending.to_host else moves
            if len(mine):
                copier.copy(pool, mine, pending.to_host, self.by_kernel)


def part_of(moves: PageMoves, rank: int, count: int) -> PageMoves:
    """Returns the contiguous part of the moves that rank `rank` of `count` ranks makes."""
    mine = slice(len(moves) * rank // count, len(moves) * (rank + 1) // count)
    return PageMoves(moves.sources[mine], moves.targets[mine])


def populate(pools: Sequence[PagePool]) -> None:
    """Has the system allocate the pools' main memory, in huge pages if it has them."""
    for pool in pools:
        use_huge_pages(pool.host)
        populate_memory(pool.host)


def page_lock(pools: Sequence[PagePool]) -> None:
    """Page-locks main memory, so that the GPU reads and writes it at the bus's rate. If the system does not allow that,
    copies are slower. A pool is locked as a whole, because CUDA refuses copies across two ranges that were locked
    separately."""
    for pool in pools:
        code = register(pool.host)
        pool.locked = code == 0
        if not pool.locked:
            logger.warning("Main memory for cached prefixes cannot be page-locked (CUDA error %s)", code)
            return
