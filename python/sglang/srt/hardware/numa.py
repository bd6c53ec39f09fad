"""Finds the CPUs near a GPU in sysfs, and keeps a rank's process on them.

Pages are allocated on the node whose CPU touches them first, so the pinned buffers of a process that stays near its GPU
are near it, too; otherwise every copy would cross the link between the sockets.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

SYSFS = Path("/sys")
_before_binding: frozenset[int] | None = None
"""CPUs that this process might use until it was kept on those of one node."""


def node_of(pci_address: str, sysfs: Path = SYSFS) -> int | None:
    """Returns the NUMA node of a PCI device ("0000:c1:00.0"); None: there is one node only, or the firmware does not
    say."""
    try:
        node = int((sysfs / "bus/pci/devices" / pci_address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 and len(all_nodes(sysfs)) > 1 else None


def all_nodes(sysfs: Path = SYSFS) -> list[int]:
    """Returns the numbers of the machine's NUMA nodes."""
    folders = (sysfs / "devices/system/node").glob("node[0-9]*")
    return sorted(int(folder.name.removeprefix("node")) for folder in folders)


def cpus_of(node: int, sysfs: Path = SYSFS) -> frozenset[int]:
    """Returns the CPUs of a node; empty if sysfs does not say."""
    try:
        return parse_cpu_list((sysfs / f"devices/system/node/node{node}/cpulist").read_text())
    except (OSError, ValueError):
        return frozenset()


def free_bytes_of(node: int, sysfs: Path = SYSFS) -> int | None:
    """Returns the bytes of a node's memory that are free or hold cached files; None if sysfs does not say."""
    try:
        lines = (sysfs / f"devices/system/node/node{node}/meminfo").read_text().splitlines()
        sizes = {words[2].rstrip(":"): int(words[3]) * 1024 for words in map(str.split, lines) if len(words) > 3}
        return sizes["MemFree"] + sizes["Active(file)"] + sizes["Inactive(file)"]
    except (OSError, ValueError, KeyError):
        return None


def usable_cpus() -> frozenset[int]:
    """Returns the CPUs on which threads of this process may be placed, those of other nodes included."""
    return frozenset(os.sched_getaffinity(0)) if _before_binding is None else _before_binding


def parse_cpu_list(text: str) -> frozenset[int]:
    """Returns the numbers of a CPU list: "0-3,8" -> {0, 1, 2, 3, 8}. Raises ValueError."""
    cpus: set[int] = set()
    for piece in text.strip().split(","):
        if piece:
            first, _, last = piece.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def bind_to_numa_node(pci_address: str, sysfs: Path = SYSFS) -> int | None:
    """Keeps this process, and the threads and processes that it starts from now on, on the CPUs of the device's node.
    Returns the node; None where nothing changes: there is one node only, or the process may use none of its CPUs."""
    global _before_binding
    node = node_of(pci_address, sysfs)
    if node is None:
        return None
    allowed = os.sched_getaffinity(0)
    near = cpus_of(node, sysfs) & allowed
    if not near:
        logger.warning(
            "The GPU at %s lies on NUMA node %d, none of whose CPUs this process may use: copies cross the link between"
            " the sockets. Do not pin the server to one node (numactl, cpuset of the container).",
            pci_address,
            node,
        )
        return None
    if near != allowed:
        _before_binding = frozenset(allowed)
        os.sched_setaffinity(0, near)
        logger.info("On the %d CPUs of NUMA node %d, where the GPU at %s lies", len(near), node, pci_address)
    return node
