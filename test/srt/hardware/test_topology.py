from __future__ import annotations

from pathlib import Path

import pytest

from sglang.srt.hardware.topology import Topology, library_topology, pci_topology

PORTS = {
    # Two behind one switch, a third behind the same root complex, a fourth on the other node.
    "0000:03:00.0": ("pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:08.0/0000:03:00.0", "0"),
    "0000:04:00.0": ("pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:10.0/0000:04:00.0", "0"),
    "0000:0a:00.0": ("pci0000:00/0000:00:03.1/0000:0a:00.0", "0"),
    "0000:81:00.0": ("pci0000:80/0000:80:01.1/0000:81:00.0", "1"),
    "0000:c1:00.0": ("pci0000:c0/0000:c0:01.1/0000:c1:00.0", "-1"),
}


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    for address, (path, node) in PORTS.items():
        device = tmp_path / "devices" / path
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
        (tmp_path / "bus/pci/devices" / address).symlink_to(device)
    return tmp_path


@pytest.mark.parametrize(
    ("addresses", "topology"),
    [
        (("0000:03:00.0", "0000:04:00.0"), Topology.SWITCH),
        (("0000:03:00.0", "0000:0A:00.0"), Topology.HOST_BRIDGE),
        (("0000:03:00.0", "0000:04:00.0", "0000:0a:00.0"), Topology.HOST_BRIDGE),
        (("0000:03:00.0", "0000:04:00.0", "0000:81:00.0"), Topology.CROSS_NUMA),
        (("0000:03:00.0", "0000:c1:00.0"), Topology.HOST_BRIDGE),
        (("0000:03:00.0", "0000:ff:00.0"), Topology.HOST_BRIDGE),
    ],
)
def test_the_worst_pair_decides(addresses: tuple[str, ...], topology: Topology, sysfs: Path) -> None:
    assert pci_topology(addresses, sysfs) is topology
    assert pci_topology(addresses[::-1], sysfs) is topology


NEAR, FAR = ("0000:03:00.0", "0000:04:00.0"), ("0000:03:00.0", "0000:81:00.0")


@pytest.mark.parametrize(
    ("links", "addresses", "environment", "reach", "wanted"),
    [
        (Topology.NVLINK, NEAR, {}, True, Topology.NVLINK),
        (Topology.NVLINK, NEAR, {"NCCL_P2P_DISABLE": "0", "NCCL_P2P_LEVEL": "SYS"}, True, Topology.NVLINK),
        (Topology.NVLINK, NEAR, {"NCCL_P2P_DISABLE": "1"}, True, Topology.HOST_BRIDGE),
        (Topology.NVLINK, NEAR, {"NCCL_P2P_LEVEL": "loc"}, True, Topology.HOST_BRIDGE),
        (Topology.NVLINK, NEAR, {}, False, Topology.HOST_BRIDGE),
        (Topology.NVLINK, FAR, {"NCCL_P2P_DISABLE": "1"}, True, Topology.CROSS_NUMA),
        (Topology.SWITCH, NEAR, {}, True, Topology.SWITCH),
        (Topology.SWITCH, NEAR, {}, False, Topology.HOST_BRIDGE),
    ],
)
def test_what_nccl_sends_passes_main_memory_where_no_gpu_may_write_into_another(
    links: Topology,
    addresses: tuple[str, ...],
    environment: dict[str, str],
    reach: bool,
    wanted: Topology,
    sysfs: Path,
) -> None:
    assert library_topology(links, addresses, environment, reach, sysfs) is wanted
