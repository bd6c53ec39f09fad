"""Main memory that a server's cached prefixes take: for each GPU, on the machine, and on each of its NUMA nodes. In
bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang.srt.plan.expert_slot_plan import CHANNEL_RATE, MainMemory
from sglang.srt.plan.host_cache import BUS_RATE, COPIED, GIB, HostCachePlan

UNBOUNDED = 1 << 60
"""Stands for the free bytes of an unknown machine: the sizes are then the most that would be taken."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What is known of a machine. `host_bytes`: free main memory; None: unknown. `numa_nodes`: nodes over which the
    GPUs are evenly spread. `channels`: of its main memory; 0: enough for the buses of all GPUs."""

    host_bytes: int | None = None
    numa_nodes: int = 1
    channels: int = 0

    @property
    def main_memory(self) -> MainMemory:
        """What experts may take of it."""
        return MainMemory(self.host_bytes, self.channels * CHANNEL_RATE)


UNKNOWN = Machine()


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The prefix cache in main memory on one machine."""

    pools: HostCachePlan
    machine: Machine
    unasked: bool
    """True: on by default, without a flag."""

    @property
    def at_most(self) -> bool:
        """Returns whether the sizes are upper bounds: no flag sets them, and the machine's free memory is unknown."""
        return self.unasked and self.machine.host_bytes is None

    @property
    def gpu_bytes(self) -> int:
        """Bytes for each GPU."""
        return self.pools.total_bytes // self.pools.sharers

    @property
    def machine_bytes(self) -> int:
        """Bytes for the whole machine."""
        return self.pools.total_bytes * self.pools.processes

    @property
    def node_bytes(self) -> int:
        """Bytes for each NUMA node; a GPU's part lies on its own node."""
        return -(-self.machine_bytes // self.machine.numa_nodes)

    def loading_seconds(self, num_tokens: int) -> float:
        """Predicts the seconds until a session that returns with `num_tokens` tokens in main memory can continue.
        Windows are left out."""
        return self.pools.copied_bytes(num_tokens, self.pools.sizes.has_states) / BUS_RATE

    def to_json(self) -> dict[str, Any]:
        """Returns sizes in bytes."""
        return {
            **self.pools.describe(),
            "bytes_of_gpu": self.gpu_bytes,
            "bytes_of_machine": self.machine_bytes,
            "numa_nodes": self.machine.numa_nodes,
            "bytes_of_numa_node": self.node_bytes,
            "at_most": self.at_most,
        }

    def __str__(self) -> str:
        nodes = self.machine.numa_nodes
        each = f", {self.node_bytes / GIB:,.2f} on each of {nodes} NUMA nodes" * (nodes > 1)
        qualifier = " at most (four times the GPU's cache, or half of what is free)" if self.at_most else ""
        return (
            f"{self.gpu_bytes / GIB:,.2f} GiB for each GPU at its NUMA node, {self.machine_bytes / GIB:,.2f} of a"
            f" machine{each}{qualifier}: prefixes of {self.pools.sizes.tokens:,} tokens, copied"
            f" {COPIED[self.pools.write_policy]}"
        )
