"""Main memory that a server's cached prefixes take, of each GPU, of the machine, and of each of its NUMA nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang.srt.plan.host_cache import BUS_RATE, COPIED, GIB, HostCachePlan

UNBOUNDED = 1 << 60
"""Free bytes of a machine of which nothing is known: what is taken then is the most that would be."""


@dataclass(frozen=True, slots=True)
class Machine:
    """host_bytes: free main memory; None: unknown. numa_nodes: that share out the GPUs evenly."""

    host_bytes: int | None = None
    numa_nodes: int = 1


UNKNOWN = Machine()


@dataclass(frozen=True, slots=True)
class HostMemory:
    pools: HostCachePlan
    machine: Machine
    unasked: bool
    """No flag asks for it."""

    @property
    def at_most(self) -> bool:
        return self.unasked and self.machine.host_bytes is None

    @property
    def gpu_bytes(self) -> int:
        return self.pools.total_bytes // self.pools.sharers

    @property
    def machine_bytes(self) -> int:
        return self.pools.total_bytes * self.pools.processes

    @property
    def node_bytes(self) -> int:
        """Of each node: a GPU's bytes lie at its own."""
        return -(-self.machine_bytes // self.machine.numa_nodes)

    def loading_seconds(self, num_tokens: int) -> float:
        """Predicted: of a session that returns with so many tokens, until a step can go on behind them. Windows are
        left out."""
        return self.pools.copied_bytes(num_tokens, self.pools.sizes.has_states) / BUS_RATE

    def to_json(self) -> dict[str, Any]:
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
        most = " at most (four times the GPU's cache, or half of what is free)" if self.at_most else ""
        return (
            f"{self.gpu_bytes / GIB:,.2f} GiB for each GPU at its NUMA node, {self.machine_bytes / GIB:,.2f} of a"
            f" machine{each}{most}: prefixes of {self.pools.sizes.tokens:,} tokens, copied"
            f" {COPIED[self.pools.write_policy]}"
        )
