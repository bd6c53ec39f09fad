"""Threads that compute: a physical core for each, on which NUMA nodes, beside the other ranks of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang.srt.hardware.cpu_cores import ANY_CPU, Neighbours, ThreadPlaces, cores, place_threads


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Two nodes of four cores with two threads each: CPUs 0-3 and 8-11, 4-7 and 12-15."""
    for cpu in range(16):
        folder = tmp_path / f"devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
    for node, text in enumerate(("0-3,8-11", "4-7,12-15")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(text + "\n")
    return tmp_path


ALL = range(16)


def test_a_cpu_of_each_physical_core(sysfs: Path) -> None:
    assert cores(sysfs, ALL) == [*range(8)]
    assert cores(sysfs, {*ALL} - {5}) == [0, 1, 2, 3, 4, 6, 7, 13]


@pytest.mark.parametrize(
    ("threads", "neighbours", "want"),
    [
        (3, Neighbours(), ThreadPlaces((5, 6, 7))),
        (8, Neighbours(), ThreadPlaces((ANY_CPU,) * 8)),
        (3, Neighbours((0,)), ThreadPlaces((3, 6, 7), (0, 1), (0, 1, 1))),
        (1, Neighbours((1,)), ThreadPlaces((7,))),
        (7, Neighbours((0,)), ThreadPlaces((ANY_CPU,) * 7)),
        (3, Neighbours((0, 1), 1), ThreadPlaces((5, 6, 7))),
        (1, Neighbours((0, 0, 1, 1), 1), ThreadPlaces((3,))),
        (2, Neighbours((0, 0), 0), ThreadPlaces((1, 5), (0, 1), (0, 1))),
        (2, Neighbours((0, 0), 1), ThreadPlaces((3, 7), (0, 1), (0, 1))),
        (3, Neighbours((None, None), 0), ThreadPlaces((1, 2, 3))),
    ],
    ids=str,
)
def test_threads_of_a_rank(sysfs: Path, threads: int, neighbours: Neighbours, want: ThreadPlaces) -> None:
    """All nodes where GPUs are on one of them, the own one where they are on all; no core twice."""
    assert place_threads(threads, neighbours, ALL, sysfs) == want


def test_cpus_that_the_process_may_not_use_are_left_alone(sysfs: Path) -> None:
    assert place_threads(2, Neighbours((0,)), range(4), sysfs) == ThreadPlaces((2, 3)), "the other node has none"
