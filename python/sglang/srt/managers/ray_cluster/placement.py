"""Resources that a server takes of a cluster, and whether the cluster has them. Pure functions over a description of
its nodes.

    replica        a placement group of its own
    its machines   (--nnodes) a bundle each, on different nodes; one machine: one bundle, so that its ranks are packed
    its ranks      a GPU each, or with --device cpu a CPU
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang.srt.errors import UserError
from sglang.srt.plan.layout import asked_layout
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.host_port import split_address

PINNED = 0.001
"""Amount of a node's own resource (Ray gives each node one, named by its address) that a bundle requests to be placed
there."""


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A live node: its address for others, and its total resources."""

    address: str
    gpus: int
    cpus: int

    def count(self, resource: str) -> int:
        """Returns the amount of "GPU" or "CPU"."""
        return self.gpus if resource == "GPU" else self.cpus


@dataclass(frozen=True, slots=True)
class Demand:
    """`replicas` times `machines` bundles with `each` of a resource, "GPU" or "CPU". first_address: the node of machine
    0, if the user names one."""

    replicas: int
    machines: int
    each: int
    resource: str
    flags: str
    first_address: str | None = None

    @property
    def strategy(self) -> str:
        """Returns Ray's name of the placement strategy."""
        return "STRICT_PACK" if self.machines == 1 else "STRICT_SPREAD"

    def bundles(self) -> list[dict[str, float]]:
        """Returns the bundles of one replica, machine by machine."""
        bundles: list[dict[str, float]] = [{self.resource: float(self.each)} for _ in range(self.machines)]
        if self.first_address is not None:
            bundles[0][f"node:{self.first_address}"] = PINNED
        return bundles


def demand_of(args: ServerArgs) -> Demand:
    """Returns the resources that a server takes. `args` must have passed the checks of flags."""
    layout = asked_layout(args)
    replicas = f"--dp-size {args.dp_size} " if args.dp_size > 1 else ""
    return Demand(
        replicas=args.dp_size,
        machines=args.nnodes,
        each=layout.world_size // args.nnodes,
        resource="CPU" if args.device == "cpu" else "GPU",
        flags=f"{replicas}{layout.flags}",
        first_address=None if args.dist_init_addr is None else split_address(args.dist_init_addr)[0],
    )


def check_room(demand: Demand, nodes: Sequence[ClusterNode]) -> None:
    """Raises UserError if the cluster has too little for the server, even without other users."""
    resource, each, machines = demand.resource, demand.each, demand.machines
    counts = [node.count(resource) for node in nodes]
    here = f"{_counted(len(nodes), 'node')} with {', '.join(map(str, sorted(counts, reverse=True)))} {resource}s"
    here = f"The Ray cluster has {here}." if nodes else "The Ray cluster has no node that is alive."
    if not any(counts):
        hint = " With --device cpu ranks take CPUs." if resource == "GPU" else ""
        raise UserError(f"--use-ray: no node has {resource}s. {here}{hint}")
    able = [count for count in counts if count >= each]
    if not able:
        ways = [f"--nnodes {count}" for count in _numbers_of_machines(demand, counts)]
        hint = f" {ways[0]} spreads them over nodes." if ways else ""
        of = "of each of its machines" if machines > 1 else "of a replica" if demand.replicas > 1 else "of the server"
        raise UserError(
            f"--use-ray: {demand.flags} takes {each} {resource}s of one node for the ranks {of}. {here}{hint}"
        )
    if len(able) < machines:
        raise UserError(
            f"--use-ray: --nnodes {machines} takes {machines} nodes with {each} {resource}s each, and"
            f" {_counted(len(able), 'node')} {'has' if len(able) == 1 else 'have'} as many. {here}"
        )
    if (room := _max_replicas(able, each, machines)) < demand.replicas:
        raise UserError(
            f"--use-ray: {demand.flags} takes {demand.replicas * machines * each} {resource}s, and there is room for"
            f" {_counted(room, 'replica')}. {here}"
        )
    first = demand.first_address
    if first is not None and not any(node.address == first and node.count(resource) >= each for node in nodes):
        addresses = ", ".join(sorted({node.address for node in nodes}))
        raise UserError(
            f"--use-ray: --dist-init-addr names {first}, and no node of that address has {each} {resource}s;"
            f" nodes are at {addresses}. Without the flag Ray chooses one."
        )


def _max_replicas(counts: Sequence[int], each: int, machines: int) -> int:
    """Returns the most replicas of `machines` different nodes each. r of them fit if the nodes have r * machines
    bundles, counting at most r of each node, since no node serves a replica twice."""
    slots = [count // each for count in counts]
    maximum = 0
    while sum(min(slot, maximum + 1) for slot in slots) >= (maximum + 1) * machines:
        maximum += 1
    return maximum


def _numbers_of_machines(demand: Demand, counts: Sequence[int]) -> list[int]:
    """Returns other values of --nnodes with which a replica fits."""
    ranks = demand.each * demand.machines
    sizes = [count for count in range(demand.machines + 1, ranks + 1) if ranks % count == 0]
    return [size for size in sizes if sum(count >= ranks // size for count in counts) >= size]


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
