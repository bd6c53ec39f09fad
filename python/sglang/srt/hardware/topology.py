"""Finds how GPUs are linked: the worst pair of a group, by the PCI tree under /sys."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path

_PCI_FUNCTION = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")


class Topology(Enum):
    """The kinds of links, from the nearest to the farthest."""

    NVLINK = "NVLink"
    SWITCH = "one PCIe switch"
    HOST_BRIDGE = "PCIe through the host's bridges"
    CROSS_NUMA = "PCIe across NUMA nodes"


_DISTANCES = tuple(Topology)


def pci_topology(addresses: Sequence[str | None], sysfs: Path = Path("/sys")) -> Topology:
    """Returns the links of two or more GPUs without NVLink at these PCI addresses ("0000:c1:00.0"). Unknown addresses
    count as connected through the host's bridges."""
    pairs = itertools.combinations(addresses, 2)
    return max((_between(first, second, sysfs) for first, second in pairs), key=_DISTANCES.index)


def library_topology(
    topology: Topology,
    addresses: Sequence[str | None],
    environment: Mapping[str, str],
    reach: bool,
    sysfs: Path = Path("/sys"),
) -> Topology:
    """Returns the path of what NCCL sends between GPUs whose links are `topology`. It goes through main memory, and so
    at least through the host's bridges, where no GPU may write into another's memory (`reach` False) or the environment
    forbids it."""
    if reach and not _forbids_peers(environment):
        return topology
    return max((pci_topology(addresses, sysfs), Topology.HOST_BRIDGE), key=_DISTANCES.index)


def _forbids_peers(environment: Mapping[str, str]) -> bool:
    """Returns whether NCCL may not use peer-to-peer copies: NCCL_P2P_DISABLE is a number other than 0, or
    NCCL_P2P_LEVEL lets no pair use them."""
    disabled, level = (environment.get(f"NCCL_P2P_{name}", "").strip() for name in ("DISABLE", "LEVEL"))
    return disabled not in ("", "0") or level.upper() in ("LOC", "0")


def _between(first: str | None, second: str | None, sysfs: Path) -> Topology:
    if first is None or second is None:
        return Topology.HOST_BRIDGE
    nodes = {_numa_node(address, sysfs) for address in (first, second)}
    if None not in nodes and len(nodes) == 2:
        return Topology.CROSS_NUMA
    bridges = [set(_bridges(address, sysfs)) for address in (first, second)]
    return Topology.SWITCH if bridges[0] & bridges[1] else Topology.HOST_BRIDGE


def _device(address: str, sysfs: Path) -> Path:
    return sysfs / "bus" / "pci" / "devices" / address.lower()


def _numa_node(address: str, sysfs: Path) -> int | None:
    try:
        node = int((_device(address, sysfs) / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return None if node < 0 else node  # -1: the firmware does not say


def _bridges(address: str, sysfs: Path) -> list[str]:
    """Returns the PCI bridges between a device and its root."""
    parts = Path(os.path.realpath(_device(address, sysfs))).parts
    return [part for part in parts[:-1] if _PCI_FUNCTION.fullmatch(part)]
