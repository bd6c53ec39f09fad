"""What the process that compiles gets, and its answer. Kernels travel by their places in the tables, as the conditions
of a table's row are functions."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import IO, Any

import msgspec

from sglang.srt.kernels.spec import KernelSpec
from sglang.srt.kernels.tables import TABLES
from sglang.srt.plan.plan import Plan
from sglang.srt.server_args import ServerArgs


@dataclass(frozen=True, slots=True)
class Job:
    """A start to rehearse. `cpus`: those on which it may compile. `processes`: how many compile at the same time."""

    args: ServerArgs
    plan: Plan
    rank: int
    cpus: frozenset[int]
    processes: int


class Report(msgspec.Struct):
    """What became of a job. `known`: kernels that were in Triton's cache. `failed`: why kernels did not compile.
    `problem`: why the rehearsal ended early."""

    compiled: int = 0
    known: int = 0
    failed: list[str] = []
    seconds: float = 0.0
    problem: str = ""


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> tuple[str, int] | None:
        if not isinstance(obj, KernelSpec):
            return None
        return next((op, i) for op, table in TABLES.items() for i, spec in enumerate(table) if spec is obj)


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> KernelSpec:
        op, i = pid
        return TABLES[op][i]


def write_job(job: Job, file: IO[bytes]) -> None:
    """Writes a job for a process of the same program. Raises StopIteration for a kernel that is in no table."""
    _Pickler(file).dump(job)


def read_job(file: IO[bytes]) -> Job:
    """Reads a job of the process that started this one."""
    job: Job = _Unpickler(file).load()
    return job
