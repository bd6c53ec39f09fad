"""Physical cores of this machine, and the NUMA nodes that they are on, for threads that compute."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from sglang.srt.hardware.numa import SYSFS, all_nodes, cpus_of, parse_cpu_list, usable_cpus

ANY_CPU = -1


def cores(sysfs: Path = SYSFS, allowed: Collection[int] | None = None) -> list[int]:
    """Returns one CPU of each physical core of the allowed CPUs; None: those that this process may use."""
    allowed = frozenset(os.sched_getaffinity(0) if allowed is None else allowed)
    usable = []
    for cpu in sorted(allowed):
        try:
            text = (sysfs / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
            siblings = parse_cpu_list(text) & allowed
        except (OSError, ValueError):
            siblings = frozenset({cpu})
        if cpu == min(siblings, default=cpu):
            usable.append(cpu)
    return usable


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The ranks of a machine, of all replicas: the NUMA node of each one's GPU (None: unknown, or there is one node
    only), and which of them this is."""

    nodes: tuple[int | None, ...] = (None,)
    index: int = 0


ALONE = Neighbours()
_neighbours = ALONE


def meet(neighbours: Neighbours) -> None:
    """Tells this process which ranks share the machine with it."""
    global _neighbours
    _neighbours = neighbours


def place_beside_others(threads: int) -> ThreadPlaces:
    """Returns `place_threads` beside the ranks that this process has been told of."""
    return place_threads(threads, _neighbours, usable_cpus())


@dataclass(frozen=True, slots=True)
class ThreadPlaces:
    """Where a rank's threads run. `cpus`: a CPU for each, ANY_CPU for no certain one. `nodes`: the NUMA nodes among
    which what they read is divided, empty for one. `node_of`: of each thread, which of these it is on."""

    cpus: tuple[int, ...]
    nodes: tuple[int, ...] = ()
    node_of: tuple[int, ...] = ()


def place_threads(
    threads: int, neighbours: Neighbours = ALONE, allowed: Collection[int] | None = None, sysfs: Path = SYSFS
) -> ThreadPlaces:
    """Places threads of a rank on physical cores of their own, the last ones, so that the first are left to other work.

    Where the ranks' GPUs are on all NUMA nodes, a rank stays on its own; otherwise it uses all of them, equally many
    threads on each. Ranks that use the same node divide its cores. Threads go anywhere if there are no more cores.
    `allowed`: CPUs that may be used; None: all that this process may use.
    """
    usable = frozenset(os.sched_getaffinity(0) if allowed is None else allowed)
    by_node = {node: cores(sysfs, cpus_of(node, sysfs) & usable) for node in all_nodes(sysfs)}
    by_node = {node: some for node, some in by_node.items() if some}
    near = neighbours.nodes[neighbours.index]
    sharers = [*range(len(neighbours.nodes))]
    if near is None or len(by_node) < 2:
        nodes = []
    elif by_node.keys() <= {*neighbours.nodes} or threads < len(by_node):
        nodes, sharers = [near], [rank for rank in sharers if neighbours.nodes[rank] == near]
    else:
        nodes = sorted(by_node)
    place = sharers.index(neighbours.index)
    cpus: list[int] = []
    node_of: list[int] = []
    for number in range(max(1, len(nodes))):
        every = by_node.get(nodes[number], []) if nodes else cores(sysfs, usable)
        mine = every[place * len(every) // len(sharers) : (place + 1) * len(every) // len(sharers)]
        count = threads * (number + 1) // max(1, len(nodes)) - threads * number // max(1, len(nodes))
        cpus += mine[-count:] if len(mine) > count else [ANY_CPU] * count
        node_of += [number] * count
    if ANY_CPU in cpus:
        return ThreadPlaces((ANY_CPU,) * threads)
    return ThreadPlaces(tuple(cpus), tuple(nodes), tuple(node_of)) if len(nodes) > 1 else ThreadPlaces(tuple(cpus))
