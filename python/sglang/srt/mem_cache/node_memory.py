"""Main memory whose rows lie on several NUMA nodes, so that threads of each node read rows of their own.

Pages are allocated on the node of the CPU that touches them first. Threads that stay on a node's CPUs touch its pages,
for which no process needs a privilege, as it would in a container to say where its memory shall be.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import torch

from sglang.srt.hardware.numa import cpus_of, usable_cpus
from sglang.srt.mem_cache.main_memory import ADVISE_POPULATE, HUGE_PAGE, map_memory

ROWS = 16
"""Rows of a node are a multiple, but for those of the last one; a test holds it to the kernels'."""
ADVISE_NO_HUGE = 15
"""MADV_NOHUGEPAGE of Linux."""
PAGES_OF_RUN = 2
"""Least pages of 2 MiB in a run of rows that lies on one node; shorter runs have pages of the usual size."""

Runs = list[tuple[int, int]]
"""Places where bytes begin and end."""
Touch = Callable[[int, int], None]
"""Has the system allocate bytes, given their address and size."""


@dataclass(frozen=True, slots=True)
class RowNodes:
    """The NUMA nodes among which the rows of an expert's matrix are divided, the first rows on the first node; `parts`
    of equal size are divided each for itself, as gate and up are."""

    nodes: tuple[int, ...] = ()
    parts: int = 1

    def with_parts(self, parts: int) -> RowNodes:
        """Returns them for a tensor with so many parts."""
        return RowNodes(self.nodes, parts)


ANYWHERE = RowNodes()


def first_row(rows: int, nodes: int, node: int) -> int:
    """Returns the first of `rows` rows that lies on the node with this number among so many."""
    return rows if node == nodes else rows * node // nodes // ROWS * ROWS


def runs_by_node(shape: Sequence[int], itemsize: int, placed: RowNodes) -> list[Runs]:
    """Returns for each node the bytes of a contiguous tensor [experts, rows, ...] that lie there."""
    rows, count = shape[1] // placed.parts, len(placed.nodes)
    row_bytes = torch.Size(shape[2:]).numel() * itemsize
    starts = [part * rows * row_bytes for part in range(shape[0] * placed.parts)]
    ends = [first_row(rows, count, node) * row_bytes for node in range(count + 1)]
    return [[(start + begin, start + end) for start in starts] for begin, end in pairwise(ends)]


def pages_of(runs: Runs, start: int, page: int) -> Runs:
    """Returns addresses of the pages that begin within the runs of memory at `start`, without empty runs."""
    whole = [(-(-(start + begin) // page) * page, -(-(start + end) // page) * page) for begin, end in runs]
    return [(begin, end) for begin, end in whole if begin < end]


def map_on_nodes(shape: Sequence[int], dtype: torch.dtype, placed: RowNodes) -> torch.Tensor:
    """Returns a tensor as `main_memory.map_memory` does, its rows on their nodes."""
    tensor = map_memory(torch.Size(shape).numel() * dtype.itemsize).view(dtype).view(tuple(shape))
    place_on_nodes(tensor, placed)
    return tensor


def place_on_nodes(tensor: torch.Tensor, placed: RowNodes, touch: Touch | None = None) -> None:
    """Has the system allocate a mapped tensor that holds nothing yet, its rows on their nodes. touch: for tests."""
    if len(placed.nodes) < 2 or tensor.ndim < 3 or tensor.shape[1] % placed.parts:
        return
    by_node = runs_by_node(tensor.shape, tensor.element_size(), placed)
    shortest = min(end - begin for runs in by_node for begin, end in runs)
    page = HUGE_PAGE if shortest >= PAGES_OF_RUN * HUGE_PAGE else mmap.PAGESIZE
    if page != HUGE_PAGE:
        _advise(tensor.data_ptr(), tensor.nbytes, ADVISE_NO_HUGE)
    with ThreadPoolExecutor(len(placed.nodes)) as threads:
        places = [pages_of(runs, tensor.data_ptr(), page) for runs in by_node]
        list(threads.map(_touch_on, placed.nodes, places, [touch or allocate] * len(places)))


def _touch_on(node: int, runs: Runs, touch: Touch) -> None:
    """Touches memory from CPUs of a node. The thread stays there."""
    if near := cpus_of(node) & usable_cpus():
        os.sched_setaffinity(0, near)
    for begin, end in runs:
        touch(begin, end - begin)


def allocate(address: int, size: int) -> None:
    """Has the system allocate whole pages that hold nothing yet."""
    if _advise(address, size, ADVISE_POPULATE):  # before Linux 5.14
        ctypes.memset(address, 0, size)


def _advise(address: int, size: int, advice: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    return int(libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(max(0, address + size - begin)), advice))
