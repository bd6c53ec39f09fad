"""Rehearses a start and compiles what it launches."""

from __future__ import annotations

import fcntl
import time
from contextlib import suppress
from dataclasses import replace
from typing import IO

from sglang.srt.distributed import parallel_state
from sglang.srt.kernels.noted_launches import NotLaunched, noted_launches
from sglang.srt.managers.compile_ahead.message import Job, Report
from sglang.srt.managers.compile_ahead.workers import Form, Workers
from sglang.srt.managers.scheduler.scheduler_setup import runner_options
from sglang.srt.model_executor.canary import check_steps
from sglang.srt.model_executor.rehearsal import RehearsedRunner, rehearsed, unread_numbers

TURN_S = 20.0
"""Seconds that a start waits for the kernels of others."""


def run(job: Job) -> Report:
    """Compiles what the start of a job launches, unless an equal one has done it meanwhile. Servers that start at the
    same time wait for one another a while, so that none compiles what another one does."""
    began = time.perf_counter()
    with job.done.with_name("lock").open("a") as lock:
        wait_for_turn(lock)  # which ends when the file is closed
        report = Report() if job.done.exists() else compiled(job)
        if not report.failed:
            job.done.touch()
    report.seconds = time.perf_counter() - began
    return report


def wait_for_turn(lock: IO[str]) -> None:
    """Takes the lock; goes on without it after TURN_S, as all files of Triton's cache appear at once."""
    end = time.monotonic() + TURN_S
    while time.monotonic() < end:
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(0.1)


def compiled(job: Job) -> Report:
    """Rehearses the job and compiles what it launches."""
    assert job.plan.arch.capability is not None
    arch = "sm_{}{}".format(*job.plan.arch.capability)
    workers, problem = Workers(arch, job.processes), ""
    try:
        rehearse(job, arch, workers)
    except Exception as error:  # what was launched before is compiled
        problem = f"{type(error).__name__}: {error}"
    report = workers.report()
    report.problem = problem
    return report


def rehearse(job: Job, arch: str, workers: Workers) -> None:
    """Starts the rank on tensors without memory, and gives the workers what it launches."""

    def note(fn: object, compile: dict[str, object]) -> NotLaunched:
        workers.compile(Form.of(fn, compile))
        return NotLaunched()

    parallel_state.rehearse(job.plan.ranks, job.rank)
    args, plan = replace(job.args, load_format="dummy"), rehearsed(job.plan)
    with noted_launches(arch, note), unread_numbers():
        runner = RehearsedRunner(plan, **runner_options(args, plan))
        if not args.skip_server_warmup:
            check_steps(runner)
