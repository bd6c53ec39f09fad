"""What the process that compiles gets from the one that starts it, and its answer. Kernels travel by their places in
the tables, as the conditions of a table's row are functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import msgspec

from sglang.srt.kernels.spec import KernelSpec
from sglang.srt.kernels.tables import TABLES
from sglang.srt.plan.plan import Plan
from sglang.srt.server_args import ServerArgs


@dataclass(frozen=True, slots=True)
class Job:
    """A start to rehearse. `cpus`: those on which it may compile. `processes`: how many compile at the same time.
    `done`: the file that says to equal starts that nothing is left to compile."""

    args: ServerArgs
    plan: Plan
    rank: int
    cpus: frozenset[int]
    processes: int
    done: Path


class Report(msgspec.Struct):
    """What became of a job. `known`: kernels that were in Triton's cache. `failed`: why kernels did not compile.
    `problem`: why the rehearsal ended early."""

    compiled: int = 0
    known: int = 0
    failed: list[str] = []
    seconds: float = 0.0
    problem: str = ""


def _in_table(spec: KernelSpec) -> tuple[Callable[[str, int], KernelSpec], tuple[str, int]]:
    """Returns how a kernel travels: as its place in the tables. Raises StopIteration for one that is in none."""
    place = next((op, i) for op, table in TABLES.items() for i, row in enumerate(table) if row is spec)
    return _row, place


def _row(op: str, place: int) -> KernelSpec:
    return TABLES[op][place]


ForkingPickler.register(KernelSpec, _in_table)
