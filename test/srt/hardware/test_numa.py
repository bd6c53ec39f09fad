"""A process moves to the CPUs near its GPU, by a faked sysfs."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.hardware import numa
from sglang.srt.managers.scheduler import scheduler_setup

GPU = "0000:C1:00.0"


def fake_sysfs(root: Path, gpu_node: str, nodes: dict[int, str]) -> Path:
    device = root / "bus/pci/devices/0000:c1:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text(gpu_node)
    for node, cpus in nodes.items():
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus)
    return root


@pytest.fixture
def affinity(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """What the process may use, the latest last; CPUs 0 to 7 and 16 to 23 at first."""
    masks: list[set[int]] = [{*range(8), *range(16, 24)}]
    monkeypatch.setattr(numa, "_before_binding", None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: masks[-1])
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: masks.append(set(cpus)))
    return masks


def test_two_sockets(tmp_path: Path, affinity: list[set[int]]) -> None:
    sysfs = fake_sysfs(tmp_path, "1\n", {0: "0-3,16-19\n", 1: "4-15,20-23\n"})
    assert numa.bind_to_numa_node(GPU, sysfs) == 1
    assert numa.usable_cpus() == {*range(8), *range(16, 24)}, "those of other nodes may still get threads"
    assert affinity[1:] == [{4, 5, 6, 7, 20, 21, 22, 23}], "only what it may use"
    assert numa.bind_to_numa_node(GPU, sysfs) == 1 and len(affinity) == 2, "it is there already"


@pytest.mark.parametrize(
    ("gpu_node", "nodes"),
    [
        ("-1\n", {0: "0-7\n", 1: "16-23\n"}),
        ("0\n", {0: "0-23\n"}),
        ("x", {0: "0-3\n", 1: "4-7\n"}),
        ("1\n", {0: "0", 2: "1"}),
    ],
    ids=["firmware does not say", "one node", "unreadable", "node without CPUs"],
)
def test_nothing_changes(gpu_node: str, nodes: dict[int, str], tmp_path: Path, affinity: list[set[int]]) -> None:
    assert numa.bind_to_numa_node(GPU, fake_sysfs(tmp_path, gpu_node, nodes)) is None
    assert len(affinity) == 1


def test_a_container_without_the_nodes_cpus_is_told(
    tmp_path: Path, affinity: list[set[int]], caplog: pytest.LogCaptureFixture
) -> None:
    assert numa.bind_to_numa_node(GPU, fake_sysfs(tmp_path, "1", {0: "0-23", 1: "24-47"})) is None
    assert len(affinity) == 1 and "none of whose CPUs this process may use" in caplog.text


def test_a_machine_without_the_device(tmp_path: Path) -> None:
    assert numa.bind_to_numa_node(GPU, tmp_path) is None


def test_this_machines_sysfs_can_be_read() -> None:
    for node in numa.SYSFS.glob("devices/system/node/node[0-9]*"):
        assert numa.cpus_of(int(node.name[4:])), "a node without CPUs"
    assert numa.parse_cpu_list("") == frozenset() and numa.parse_cpu_list("0-2,5\n") == {0, 1, 2, 5}


def test_free_memory_of_a_node(tmp_path: Path) -> None:
    folder = tmp_path / "devices/system/node/node1"
    folder.mkdir(parents=True)
    lines = ["Node 1 MemTotal:       9000 kB", "Node 1 MemFree:        1000 kB", "Node 1 Active(file):    20 kB",
             "Node 1 Inactive(file):   3 kB", "Node 1 HugePages_Total:     0"]  # fmt: skip
    (folder / "meminfo").write_text("\n".join(lines) + "\n")
    assert numa.free_bytes_of(1, tmp_path) == 1023 * 1024
    assert numa.free_bytes_of(0, tmp_path) is None


def test_each_gpu_takes_main_memory_of_its_own_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three GPUs of one node and one of the other: the fuller share bounds what every rank takes."""
    nodes, free = {"a": 0, "b": 0, "c": 0, "d": 1}, {0: 90, 1: 200}
    monkeypatch.setattr(scheduler_setup, "pci_address", lambda gpu: "abcd"[gpu])
    monkeypatch.setattr(scheduler_setup, "node_of", nodes.get)
    monkeypatch.setattr(scheduler_setup, "free_bytes_of", free.get)
    machine: Any = SimpleNamespace(devices=range(4), ranks=range(4))
    assert scheduler_setup._numa_memory(machine, 290, 1) == 4 * 30
    assert scheduler_setup._numa_memory(machine, 100, 1) == 100
    assert scheduler_setup._numa_memory(SimpleNamespace(devices=[3], ranks=[3]), 290, 1) == 200
    monkeypatch.setattr(scheduler_setup, "node_of", lambda address: None)
    assert scheduler_setup._numa_memory(machine, 290, 1) == 290
