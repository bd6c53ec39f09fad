"""Rehearses a start and compiles what it launches: receives a `Job` and sends a `Report`, through the pipe whose number
it is given. It uses no GPU."""

from __future__ import annotations

import fcntl
import logging
import os
import sys
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
from triton import knobs

from sglang.srt.distributed import parallel_state
from sglang.srt.kernels.noted_launches import NotLaunched, noted_launches
from sglang.srt.managers.compile_ahead.message import Job, Report
from sglang.srt.managers.compile_ahead.workers import Form, Workers
from sglang.srt.managers.scheduler.scheduler_setup import runner_options
from sglang.srt.model_executor.canary import check_steps
from sglang.srt.model_executor.rehearsal import RehearsedRunner, rehearsed, unread_numbers
from sglang.srt.utils.process_limits import die_with_parent, name_process

NICENESS = 5
LOCK = "sm120-sglang.lock"


def run(job: Job) -> Report:
    """Compiles what the start of a job launches. Servers that start at the same time wait for one another, so that none
    compiles what another one does."""
    started = time.perf_counter()
    with (Path(knobs.cache.dir) / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # held until the file is closed
        assert job.plan.arch.capability is not None
        arch = "sm_{}{}".format(*job.plan.arch.capability)
        workers, problem = Workers(arch, job.processes), ""
        try:
            rehearse(job, arch, workers)
        except Exception as error:  # what was launched before is compiled
            problem = f"{type(error).__name__}: {error}"
        report = workers.report()
    report.seconds, report.problem = time.perf_counter() - started, problem
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


def main() -> None:
    """Runs the job that comes through the pipe."""
    die_with_parent()
    name_process("compile_ahead")
    os.nice(NICENESS)
    logging.disable()  # the rank says all that once more
    pipe = Connection(int(sys.argv[1]))
    job: Job = pipe.recv()
    os.sched_setaffinity(0, job.cpus)
    pipe.send_bytes(msgspec.json.encode(run(job)))


if __name__ == "__main__":
    main()
