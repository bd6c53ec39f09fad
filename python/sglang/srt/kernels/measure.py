"""Enumerates the launch variants of every kernel and measures them in worker processes."""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from sglang.srt.environ import envs
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.kernels.compile import measure_cached, variant_hash
from sglang.srt.kernels.ledger_file import LOCKS, Measurement, Row, Rows, tile_key
from sglang.srt.kernels.variant import Variant

# Named, not imported: the kernels are a layer above this one. Each has OPS and variants(op, features).
VARIANT_MODULES = (
    "sglang.srt.layers.attention.triton_ops.variants",
    "sglang.srt.layers.triton_ops.variants",
    "sglang.srt.layers.moe.fused_moe_triton.variants",
)

RowKey = tuple[str, str, str]


def variants_of(lock: str) -> Iterator[Variant]:
    """Every variant whose tile the table allows on an architecture of the lock file."""
    features = tuple(sorted(arch_by_name(LOCKS[lock][0]).features))
    for name in VARIANT_MODULES:
        module = importlib.import_module(name)
        for op in module.OPS:
            yield from module.variants(op, features)


def row_key(variant: Variant) -> RowKey:
    return variant.op, variant.key, tile_key(variant.tile)


@functools.cache
def variant_table(lock: str) -> dict[RowKey, Variant]:
    """By row. Of tiles that the compiler cannot tell apart the first stays: it is the preferred one."""
    table: dict[RowKey, Variant] = {}
    for variant in variants_of(lock):
        table.setdefault(row_key(variant), variant)
    return table


@dataclass(frozen=True, slots=True)
class Job:
    lock: str
    row: RowKey
    arch: str


def measure(jobs: list[Job], processes: int = 2, progress: bool = True) -> dict[Job, Measurement | str]:
    """The measurement of each job, or the message of the compiler that failed. Uses the Triton of this Python."""
    results: dict[Job, Measurement | str] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        futures = {pool.submit(_run, job, envs.SGLANG_CACHE_DIR / "ledger"): job for job in jobs}
        for done, future in enumerate(as_completed(futures), 1):
            results[futures[future]] = future.result()
            if progress and (done % 25 == 0 or done == len(jobs)):
                print(f"  {done}/{len(jobs)} compiled", file=sys.stderr, flush=True)
    return results


def _run(job: Job, cache_dir: Path) -> Measurement | str:
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as today's launches; silences a notice of Triton 3.9
    from sglang.srt.kernels.compile import CompileFailed

    try:
        return measure_cached(variant_table(job.lock)[job.row], job.arch, cache_dir)
    except CompileFailed as error:
        return str(error)


def all_jobs(lock: str, only: str = "") -> list[Job]:
    """One a row and architecture; `only` restricts them to rows whose op/key/tile contains it."""
    return [Job(lock, row, arch) for row in variant_table(lock) if only in "/".join(row) for arch in LOCKS[lock]]


def to_rows(lock: str, results: dict[Job, Measurement | str], triton_version: str) -> tuple[Rows, list[str]]:
    """Rows of the lock file, and the messages of what did not compile."""
    rows: Rows = {}
    failures: list[str] = []
    for job, result in results.items():
        if isinstance(result, str):
            failures.append(f"Triton {triton_version}: {result}")
            continue
        row = rows.setdefault(job.row, Row(variant_hash(variant_table(lock)[job.row])))
        row.by_target[f"{triton_version}/{job.arch}"] = result
    return rows, failures
