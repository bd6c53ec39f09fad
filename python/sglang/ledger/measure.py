"""Measures the launch variants of every kernel in worker processes."""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from sglang.ledger.compile import CompileFailed, measure_cached, variant_hash
from sglang.ledger.forms import read_forms
from sglang.ledger.targets import NOT_NATIVE
from sglang.ledger.variant import Variant
from sglang.srt.environ import envs
from sglang.srt.kernels.ledger_file import LOCKS, LedgerRows, Measurement, Row, RowKey, tile_key


def row_key(variant: Variant) -> RowKey:
    """Returns the key of a variant's row in a lock file."""
    return variant.op, variant.key, tile_key(variant.tile)


@functools.cache
def variant_table(lock: str) -> dict[RowKey, Variant]:
    """Returns the variants of a lock file by row key."""
    return read_forms(lock)


def variant_of(lock: str, op: str, key: str) -> Variant:
    """Returns the variant of an op and key with its first tile."""
    return next(variant for row, variant in variant_table(lock).items() if row[:2] == (op, key))


@dataclass(frozen=True, slots=True)
class Job:
    """A row to measure on some architectures of its lock file."""

    lock: str
    row: RowKey
    archs: tuple[str, ...]


Results = dict[Job, "dict[str, Measurement] | str"]
"""The measurements by architecture, or the message of the compiler that failed."""


def measure(jobs: list[Job], processes: int = 2, progress: bool = True) -> Results:
    """Runs the jobs with the Triton of this Python; `processes` 1: in this process, which has loaded it."""
    results: Results = {}
    if not jobs:
        return results
    if processes == 1:
        return {job: _run(job, envs.SGLANG_CACHE_DIR / "ledger") for job in jobs}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        futures = {pool.submit(_run, job, envs.SGLANG_CACHE_DIR / "ledger"): job for job in jobs}
        for done, future in enumerate(as_completed(futures), 1):
            results[futures[future]] = future.result()
            if progress and (done % 25 == 0 or done == len(jobs)):
                print(f"  {done}/{len(jobs)} compiled", file=sys.stderr, flush=True)
    return results


def _run(job: Job, cache_dir: Path) -> dict[str, Measurement] | str:
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # the same as in launches; silences a notice of Triton 3.9
    try:
        return measure_cached(variant_table(job.lock)[job.row], job.archs, cache_dir)
    except CompileFailed as error:
        return str(error)


def targets(lock: str, variant: Variant, triton_version: str) -> tuple[str, ...]:
    """Returns the architectures of a lock file for which this Triton compiles a variant."""
    return tuple(a for a in LOCKS[lock] if not (variant.native_only and f"{triton_version}/{a}" in NOT_NATIVE))


def all_jobs(lock: str, only: str = "", known: LedgerRows | None = None, triton_version: str = "") -> list[Job]:
    """Returns one job a row. `only`: rows whose op/key/tile contains it. `known`: measurements of the same code with
    `triton_version` are left out."""
    jobs: list[Job] = []
    for row, variant in variant_table(lock).items():
        if only not in "/".join(row):
            continue
        archs = targets(lock, variant, triton_version)
        old = (known or {}).get(row)
        if old is not None and old.code == variant_hash(variant):
            archs = tuple(arch for arch in archs if f"{triton_version}/{arch}" not in old.by_target)
        if archs:
            jobs.append(Job(lock, row, archs))
    return jobs


def to_rows(lock: str, results: Results, triton_version: str) -> tuple[LedgerRows, list[str]]:
    """Returns the rows of the lock file, and the error messages of variants that did not compile."""
    rows: LedgerRows = {}
    failures: list[str] = []
    for job, result in results.items():
        if isinstance(result, str):
            failures.append(f"Triton {triton_version}: {result}")
            continue
        row = rows.setdefault(job.row, Row(variant_hash(variant_table(lock)[job.row])))
        row.by_target |= {f"{triton_version}/{arch}": value for arch, value in result.items()}
    return rows, failures
