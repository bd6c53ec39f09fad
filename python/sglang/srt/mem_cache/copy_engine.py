"""Copies of cache pages between the GPU's pools and main memory, in a thread and on a stream of their own.

A page lies in main memory as one run of bytes: of every layer the part that belongs to it, one after the other. On the
way it is gathered into a staging buffer, or scattered from it, so that one copy over the bus moves many pages.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
import torch

from sglang.srt.mem_cache.cache_tier import CopyState, PageMoves
from sglang.srt.mem_cache.memory_pool import CachePools
from sglang.srt.plan.host_cache import STAGING_BYTES
from sglang.srt.plan.pool_sizes import PoolSizes
from sglang.srt.utils.device_arrays import event_on

logger = logging.getLogger(__name__)


class PagePool:
    """The pages of one pool on the device and in main memory, where they begin at page 1: page 0 is padding."""

    def __init__(self, parts: Sequence[torch.Tensor], num_host_pages: int) -> None:
        """parts: [pages, bytes] uint8 each, views of the caches' tensors."""
        widths = [part.shape[1] for part in parts]
        self.page_bytes = sum(widths)
        self.host = torch.empty((num_host_pages, self.page_bytes), dtype=torch.uint8)
        self.bundles: list[tuple[int, list[torch.Tensor]]] = []
        """Parts that fit into the staging buffer together, and where they begin in a page."""
        start = size = 0
        for part, width in zip(parts, widths, strict=True):
            if not self.bundles or size + width > STAGING_BYTES:
                self.bundles.append((start, []))
                size = 0
            self.bundles[-1][1].append(part)
            start, size = start + width, size + width

    def copy(self, moves: PageMoves, to_host: bool, staging: torch.Tensor) -> None:
        """Copies pages on the current stream."""
        on_device, in_host = (moves.sources, moves.targets) if to_host else (moves.targets, moves.sources)
        for start, parts in self.bundles:
            width = sum(part.shape[1] for part in parts)
            step = max(1, len(staging) // width)
            for first in range(0, len(moves), step):
                pages = torch.from_numpy(on_device[first : first + step]).to(staging.device, non_blocking=True)
                staged = staging[: len(pages) * width].view(len(pages), width)
                runs = _runs(in_host[first : first + step] - 1, width == self.page_bytes)
                if to_host:
                    _gather(staged, parts, pages)
                for row, page, count in runs:
                    of_host, of_device = (
                        self.host[page : page + count, start : start + width],
                        staged[row : row + count],
                    )
                    target, source = (of_host, of_device) if to_host else (of_device, of_host)
                    target.copy_(source, non_blocking=True)
                if not to_host:
                    _scatter(staged, parts, pages)


def _gather(staged: torch.Tensor, parts: Sequence[torch.Tensor], pages: torch.Tensor) -> None:
    column = 0
    for part in parts:
        staged[:, column : column + part.shape[1]] = part[pages]
        column += part.shape[1]


def _scatter(staged: torch.Tensor, parts: Sequence[torch.Tensor], pages: torch.Tensor) -> None:
    column = 0
    for part in parts:
        part.index_copy_(0, pages, staged[:, column : column + part.shape[1]])
        column += part.shape[1]


def _runs(pages: np.ndarray, whole: bool) -> list[tuple[int, int, int]]:
    """(first row, first page, count) of pages that follow one another; with `whole` False one by one, because parts of
    pages are no contiguous memory."""
    breaks = np.flatnonzero(np.diff(pages) != 1) + 1 if whole else np.arange(1, len(pages))
    starts = np.concatenate(([0], breaks))
    counts = np.diff(np.concatenate((starts, [len(pages)])))
    return list(zip(starts.tolist(), pages[starts].tolist(), counts.tolist(), strict=True))


def page_pools(pools: CachePools, sizes: PoolSizes, of_host: PoolSizes) -> list[PagePool]:
    """Pools in the order of `Transfer.all_moves`: of tokens, of each window, and where there are states, of these."""
    page, num_windows = sizes.page_size, len(sizes.windows)
    device_pages = [sizes.tokens // page + 1, *(window.tokens // page + 1 for window in sizes.windows)]
    host_pages = [of_host.tokens // page, *(window.tokens // page for window in of_host.windows)]
    by_table = [
        PagePool([_bytes(tensor, device_pages[table]) for tensor in pools.of_table(table)], host_pages[table])
        for table in range(1 + num_windows)
    ]
    if sizes.has_states:
        parts = [_bytes(state, sizes.state_rows) for states in pools.states for state in states]
        by_table.append(PagePool(parts, of_host.checkpoints))
    return by_table


def _bytes(tensor: torch.Tensor, num_pages: int) -> torch.Tensor:
    """[pages, bytes] of a contiguous tensor."""
    return tensor.reshape(len(tensor), -1).view(torch.uint8).view(num_pages, -1)


@dataclass(slots=True, eq=False)
class PendingCopy:
    """Implements CopyHandle."""

    moves: Sequence[PageMoves]
    to_host: bool
    steps_launched: torch.cuda.Event | None
    state: CopyState = CopyState.UNDER_WAY


class ThreadedCopies:
    """Implements CopyEngine. On a GPU the thread launches on its own stream, behind the steps launched before."""

    def __init__(self, pools: Sequence[PagePool], device: torch.device | str, num_threads: int = 1) -> None:
        self.pools = list(pools)
        self.page_bytes = [pool.page_bytes for pool in self.pools]
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:  # a thread begins with GPU 0 as the current one
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.ready = self.device.type != "cuda"
        self._queue: SimpleQueue[PendingCopy] = SimpleQueue()
        for _ in range(num_threads):
            threading.Thread(target=self._work, name="cache-copies", daemon=True).start()

    def submit(self, moves: Sequence[PageMoves], to_host: bool) -> PendingCopy:
        pending = PendingCopy(moves, to_host, event_on(self.device))
        self._queue.put(pending)
        return pending

    @torch.inference_mode()
    def _work(self) -> None:
        widest = max((part.shape[1] for pool in self.pools for _, parts in pool.bundles for part in parts), default=0)
        stream = None
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            stream = torch.cuda.Stream()
            torch.cuda.set_stream(stream)
            self._page_lock()
        staging = torch.empty(max(widest, STAGING_BYTES), dtype=torch.uint8, device=self.device)
        self.ready = True
        while True:
            pending = self._queue.get()
            try:
                if stream is not None and pending.steps_launched is not None:
                    stream.wait_event(pending.steps_launched)
                self.run(pending, staging)
                if stream is not None:
                    stream.synchronize()
                pending.state = CopyState.DONE
            except Exception:  # a failed copy costs computation, never the server
                logger.exception("A copy of cached prefixes failed; they are computed again")
                pending.state = CopyState.FAILED

    def run(self, pending: PendingCopy, staging: torch.Tensor) -> None:
        for pool, moves in zip(self.pools, pending.moves, strict=True):
            if len(moves):
                pool.copy(moves, pending.to_host, staging)

    def _page_lock(self) -> None:
        """Lets the GPU read and write main memory at the bus's rate. Where the system does not allow it, copies are
        slower. A pool is locked as a whole: CUDA refuses copies across two ranges that were locked apart."""
        for pool in self.pools:
            code = torch.cuda.cudart().cudaHostRegister(pool.host.data_ptr(), pool.host.numel(), 0)
            if int(code) != 0:
                logger.warning("Main memory for cached prefixes cannot be page-locked (CUDA error %s)", code)
                return
