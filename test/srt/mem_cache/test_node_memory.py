"""Main memory whose rows lie on several NUMA nodes: which bytes go where, and that nothing else changes."""

from __future__ import annotations

import mmap
import threading
from itertools import pairwise

import pytest
import torch

from sglang.srt.mem_cache import node_memory
from sglang.srt.mem_cache.main_memory import HUGE_PAGE
from sglang.srt.mem_cache.node_memory import ANYWHERE, RowNodes, map_on_nodes, pages_of, place_on_nodes, runs_by_node


def test_every_byte_lies_on_one_node_and_rows_on_that_of_their_part() -> None:
    """Three experts with gate and up of 48 rows: 16 rows of each on the first node, 32 on the second."""
    runs = runs_by_node((3, 96, 10), 2, RowNodes((0, 1), 2))
    owner = [-1] * (3 * 96 * 20)
    for node, places in enumerate(runs):
        for begin, end in places:
            assert owner[begin:end] == [-1] * (end - begin)
            owner[begin:end] = [node] * (end - begin)
    rows = [owner[row * 20 : row * 20 + 20] for row in range(3 * 96)]
    assert all(len({*row}) == 1 for row in rows)
    assert [row[0] for row in rows] == ([0] * 16 + [1] * 32) * 6


def test_pages_belong_to_the_run_in_which_they_begin() -> None:
    assert pages_of([(0, 10), (10, 100), (100, 300)], 4096, 64) == [(4096, 4160), (4160, 4224), (4224, 4416)]
    assert pages_of([(0, 10), (10, 20)], 4090, 64) == [(4096, 4160)], "no page begins in the first"


@pytest.mark.parametrize(("columns", "page"), [(640, mmap.PAGESIZE), (1 << 19, HUGE_PAGE)])
def test_threads_of_each_node_touch_its_pages(columns: int, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of 2 MiB where each run holds several."""
    near: dict[int, set[int]] = {}
    monkeypatch.setattr(node_memory, "cpus_of", lambda node: frozenset({node + 40}))
    monkeypatch.setattr(node_memory, "usable_cpus", lambda: frozenset({40, 41}))
    monkeypatch.setattr("os.sched_setaffinity", lambda pid, cpus: near.update({threading.get_ident(): {*cpus}}))
    touched: list[tuple[int, int, int]] = []
    both = threading.Barrier(2)
    seen = threading.local()

    def touch(address: int, size: int) -> None:
        if not hasattr(seen, "node"):
            seen.node = both.wait()  # both threads are at work
        (cpu,) = near[threading.get_ident()]
        touched.append((address, address + size, cpu - 40))

    shape = (2, 64, columns)
    tensor = map_on_nodes(shape, torch.bfloat16, ANYWHERE)
    assert tensor.shape == shape and tensor.is_contiguous() and tensor.dtype == torch.bfloat16
    place_on_nodes(tensor, RowNodes((0, 1), 2), touch)
    touched.sort()
    assert {node for *_, node in touched} == {0, 1}
    assert all(begin % page == end % page == 0 for begin, end, _ in touched)
    assert all(one[1] == other[0] for one, other in pairwise(touched)), "no gap, nothing twice"
    assert touched[0][0] - tensor.data_ptr() < page and touched[-1][1] >= tensor.data_ptr() + tensor.nbytes
    expert = 64 * columns * 2
    for begin, _, node in touched:
        row = (begin - tensor.data_ptr()) % expert // (columns * 2) % 32
        assert node == (row >= 16)


def test_memory_on_nodes_is_zeros_that_hold_what_is_written() -> None:
    """For real, also on a machine without the second node."""
    tensor = map_on_nodes((3, 96, 512), torch.uint8, RowNodes((0, 1), 2))
    assert not tensor.any()
    assert torch.equal(tensor.copy_(torch.arange(3 * 96 * 512).view(3, 96, 512) % 251), tensor.clone()) and tensor.any()
    assert map_on_nodes((5, 7), torch.float32, RowNodes((0, 1))).shape == (5, 7)
    assert map_on_nodes((5, 7, 3), torch.float32, ANYWHERE).shape == (5, 7, 3)
