"""Pages of one pool on the device and in main memory, and the conversion between their layouts.

On the device a page is split into parts, one or two a layer. In main memory it is one run of bytes: its parts, one
after the other. A copy passes through a row, in a buffer on the device or in main memory itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sglang.srt.mem_cache.memory_pool import CachePools
from sglang.srt.plan.host_cache import STAGING_BYTES
from sglang.srt.plan.pool_sizes import PoolSizes

WORDS = {8: torch.int64, 4: torch.int32}
"""Word types of the kernel by size. Caches whose parts are not whole words are copied by torch."""


Allocate = Callable[[int], torch.Tensor]
"""Returns the given number of bytes of main memory, [N] uint8."""


def private_memory(num_bytes: int) -> torch.Tensor:
    """Returns main memory of this process alone."""
    return torch.empty(num_bytes, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class Segment:
    """A byte range of one part's page."""

    part: torch.Tensor
    """[pages, bytes] uint8"""
    start: int
    """Offset in a row."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """The bytes of a page that are copied together: no more than fit into a buffer."""

    start: int
    """Offset in a page."""
    width: int
    segments: list[Segment]
    strips: torch.Tensor | None
    """[S, 4] strips of `page_kernel`; None if the kernel does not copy."""
    strip_words: int


class PagePool:
    """The pages of one pool in both memories. Main memory, too, begins at page 1: page 0 is padding."""

    def __init__(
        self,
        parts: Sequence[torch.Tensor],
        num_host_pages: int,
        staging_bytes: int = STAGING_BYTES,
        by_kernel: bool | None = None,
        layers: Sequence[int] = (),
        allocate: Allocate = private_memory,
    ) -> None:
        """parts: [pages, bytes] uint8 each, contiguous views of the caches' tensors. staging_bytes: most bytes of a
        bundle, a multiple of 8. by_kernel: the kernel makes the rows; by default it does on a GPU. layers: the layer of
        each part; without them the pages of all layers are copied before any layer reads them."""
        self.parts = list(parts)
        self.page_bytes = sum(part.shape[1] for part in parts)
        self.host = allocate(num_host_pages * self.page_bytes).view(num_host_pages, self.page_bytes)
        self.locked = False
        """Whether the device can address main memory."""
        self.word = math.gcd(8, *(n for part in parts for n in (part.shape[1], part.data_ptr())))
        wanted = any(part.is_cuda for part in parts) if by_kernel is None else by_kernel
        self.by_kernel = wanted and self.word in WORDS
        self.bundles = [self._bundle(start, segments) for start, segments in self._cut(staging_bytes)]
        self.by_layer = self._by_layer(layers)
        """What a layer reads of a page, as segments of rows that are whole pages; empty without layers."""

    def _cut(self, maximum: int) -> list[tuple[int, list[Segment]]]:
        cuts: list[tuple[int, list[Segment]]] = []
        start, size = 0, maximum
        for part in self.parts:
            first = 0
            while first < part.shape[1]:
                if size == maximum:
                    cuts.append((start, []))
                    size = 0
                count = min(part.shape[1] - first, maximum - size)
                cuts[-1][1].append(Segment(part[:, first : first + count], size))
                first, start, size = first + count, start + count, size + count
        return cuts

    def _by_layer(self, layers: Sequence[int]) -> dict[int, Bundle]:
        ends = itertools.accumulate(part.shape[1] for part in self.parts)
        segments: dict[int, list[Segment]] = {}
        for layer, part, end in zip(layers, self.parts, ends, strict=False):
            segments.setdefault(layer, []).append(Segment(part, end - part.shape[1]))
        return {layer: self._bundle(0, segments[layer], self.page_bytes) for layer in sorted(segments)}

    def _bundle(self, start: int, segments: list[Segment], width: int = 0) -> Bundle:
        width = width or sum(segment.part.shape[1] for segment in segments)
        if not self.by_kernel:
            return Bundle(start, width, segments, None, 0)
        from sglang.srt.mem_cache.page_kernel import WIDTHS  # needs Triton

        widest = max(segment.part.shape[1] for segment in segments) // self.word
        strip_words = next((words for words in WIDTHS if words >= widest), WIDTHS[-1])
        strips = [
            (segment.part.data_ptr() + at * self.word, segment.part.stride(0) // self.word,
             segment.start // self.word + at, min(strip_words, segment.part.shape[1] // self.word - at))
            for segment in segments
            for at in range(0, segment.part.shape[1] // self.word, strip_words)
        ]  # fmt: skip
        table = torch.tensor(strips, dtype=torch.int64, device=segments[0].part.device)
        return Bundle(start, width, segments, table, strip_words)

    def rows_of(self, bundle: Bundle) -> torch.Tensor:
        """Returns a bundle's rows of main memory, [pages, width]."""
        return self.host[:, bundle.start : bundle.start + bundle.width]

    def copy(
        self, bundle: Bundle, rows: torch.Tensor, row_ids: torch.Tensor, pages: torch.Tensor, to_rows: bool
    ) -> None:
        """Copies `pages` [N] int64 to the rows `row_ids` [N] int64 of `rows` [R, width], or back, on the current
        stream."""
        if bundle.strips is None:
            copy_segments(bundle.segments, rows, row_ids, pages, to_rows)
            return
        from sglang.srt.mem_cache.page_kernel import copy_rows

        copy_rows(bundle.strips, bundle.strip_words, pages, row_ids, rows.view(WORDS[self.word]), to_rows)


def copy_segments(
    segments: Sequence[Segment], rows: torch.Tensor, row_ids: torch.Tensor, pages: torch.Tensor, to_rows: bool
) -> None:
    """Copies like `PagePool.copy`, by torch."""
    for segment in segments:
        columns = rows[:, segment.start : segment.start + segment.part.shape[1]]
        if to_rows:
            columns[row_ids] = segment.part[pages]
        else:
            segment.part[pages] = columns[row_ids]


def page_pools(pools: CachePools, sizes: PoolSizes, of_host: PoolSizes, allocate: Allocate) -> list[PagePool]:
    """Returns pools in the order of `Transfer.all_moves`: tokens, each window, and states if there are any."""
    page, num_windows = sizes.page_size, len(sizes.windows)
    device_pages = [sizes.tokens // page + 1, *(window.tokens // page + 1 for window in sizes.windows)]
    host_pages = [of_host.tokens // page, *(window.tokens // page for window in of_host.windows)]
    by_table = []
    for table in range(1 + num_windows):
        tensors = pools.table_tensors(table)
        parts = [_bytes(tensor, device_pages[table]) for _, tensor in tensors]
        by_table.append(PagePool(parts, host_pages[table], layers=[layer for layer, _ in tensors], allocate=allocate))
    if sizes.has_states:
        parts = [_bytes(state, sizes.state_rows) for states in pools.states for state in states]
        by_table.append(PagePool(parts, of_host.checkpoints, allocate=allocate))
    return by_table


def _bytes(tensor: torch.Tensor, num_pages: int) -> torch.Tensor:
    """Returns a contiguous tensor as [pages, bytes]."""
    return tensor.reshape(len(tensor), -1).view(torch.uint8).view(num_pages, -1)
