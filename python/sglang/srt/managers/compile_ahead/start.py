"""The rank's side: starts the process that compiles, and waits for it before the first launch."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from threading import Thread
from typing import IO, Any

import msgspec

from sglang.srt.arguments.groups import ADAPTERS, KERNELS, MEMORY, MODEL, PARALLEL, SPECULATION
from sglang.srt.distributed import parallel_state
from sglang.srt.environ import envs
from sglang.srt.hardware.numa import usable_cpus
from sglang.srt.managers.compile_ahead.message import Job, Report
from sglang.srt.plan.layout import asked_node
from sglang.srt.plan.plan import Plan
from sglang.srt.server_args import ServerArgs
from sglang.version import __version__

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "sglang.srt.managers.compile_ahead")
MAX_PROCESSES = 16
WAIT_S = 60.0
"""Seconds that a start waits for the process after the weights are read."""
LAUNCHED_GROUPS = frozenset({MODEL, MEMORY, PARALLEL, KERNELS, SPECULATION, ADAPTERS})
LAUNCHED = frozenset({"enable_return_hidden_states", "skip_server_warmup", "language_model_only"})
NOT_LAUNCHED = frozenset(
    {
        "base_gpu_id", "dist_init_addr", "dist_timeout", "load_balance_method", "max_queued_requests",
        "measure_seconds", "prefix_affinity_fallback", "random_seed", "served_model_name", "stream_interval", "use_ray",
    }
)  # fmt: skip
"""Arguments that decide about what is launched: those of groups and others, without some that may differ from start to
start, or between replicas."""


@dataclass(slots=True)
class CompileAhead:
    """The running process. `done`: the file that says to later starts that nothing is left to compile."""

    process: subprocess.Popen[bytes]
    pipe: Connection
    errors: IO[bytes]
    done: Path

    def wait(self, limit_s: float = WAIT_S) -> None:
        """Waits until the process has ended, ends it at the limit, and logs what it did. Never raises for what went
        wrong there: the kernels are compiled when they are launched."""
        began, answer = time.perf_counter(), b""
        if not self.pipe.poll(limit_s):
            self.end()
            logger.warning("Kernels were not all compiled %.0f s after reading weights; the start goes on", limit_s)
            with suppress(OSError):  # of a full disk
                self.done.touch()  # this start compiles what is left, and later ones shall not wait for it
            return
        with suppress(EOFError, OSError):  # the process is gone
            answer = self.pipe.recv_bytes()
        self.end()
        if not answer:
            self.errors.seek(0)
            last = self.errors.read().decode(errors="replace").strip().rpartition("\n")[2]
            logger.warning("No kernels were compiled ahead: %s", last)
            return
        report = msgspec.json.decode(answer, type=Report)
        self._log(report, time.perf_counter() - began)

    def end(self) -> None:
        """Ends the process and those that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @staticmethod
    def _log(report: Report, waited: float) -> None:
        known = f", found {report.known} in Triton's cache" if report.known else ""
        logger.info(
            "Compiled %d kernels in %.1f s beside reading weights%s; waited %.1f s for them",
            report.compiled, report.seconds, known, waited,
        )  # fmt: skip
        if report.failed:
            more = f" and {len(report.failed) - 1} more" if len(report.failed) > 1 else ""
            logger.warning("Not compiled ahead: %s%s", report.failed[0][:500], more)
        if report.problem:
            logger.warning("Only some kernels were compiled ahead: %s", report.problem[:500])


def compiling_beside(args: ServerArgs, plan: Plan, rank: int, replicas: int) -> Callable[[], None]:
    """Starts compiling what the ranks will launch, as `compile_ahead` does. Returns what each rank calls before its
    first launch. A collective: the other ranks launch what one has waited for."""
    compiling = compile_ahead(args, plan, rank, replicas)

    def wait() -> None:
        if compiling is not None:
            compiling.wait()
        parallel_state.wait_for_all_ranks()

    return wait


def compile_ahead(
    args: ServerArgs, plan: Plan, rank: int, replicas: int, command: tuple[str, ...] = COMMAND
) -> CompileAhead | None:
    """Starts compiling what this rank will launch. None: there is nothing to do, because there is no GPU, a flag says
    so, another rank of the machine does it, an equal start did it, or there are no free CPUs. replicas: engines on this
    machine; command: replaced by tests."""
    node, cpus = asked_node(args), usable_cpus()
    count = min(MAX_PROCESSES, len(cpus) - len(node.ranks) * replicas)
    if plan.device != "cuda" or args.disable_compile_ahead or envs.SGLANG_FORCE_ARCH is not None:
        return None
    if rank != min(node.ranks) or count < 2:
        return None
    try:
        from triton import knobs

        done = Path(knobs.cache.dir) / "sm120-sglang" / _digest(args, plan)
        if done.exists():
            return None
        done.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(done.parent, os.W_OK):
            raise PermissionError(f"{done.parent} cannot be written")
        job = ForkingPickler.dumps(Job(args, plan, rank, cpus, count, done))
        errors = tempfile.TemporaryFile()  # noqa: SIM115
        ours, theirs = Pipe()
        with theirs:
            # It computes nothing, so it needs no GPU, and takes no memory of it.
            paths = os.pathsep.join(path for path in sys.path if path)
            environment = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
            process = subprocess.Popen(
                (*command, str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )
        compiling = CompileAhead(process, ours, errors, done)
        Thread(target=_send, args=(ours, job), name="compile-ahead", daemon=True).start()  # the pipe may be full
    except Exception as error:  # no start fails for this
        logger.warning("No kernels are compiled ahead: %s: %s", type(error).__name__, error)
        return None
    return compiling


def _send(pipe: Connection, job: memoryview) -> None:
    with suppress(OSError):  # the process is gone, which `wait` says
        pipe.send_bytes(job)


def _digest(args: ServerArgs, plan: Plan) -> str:
    """Returns the name of a start: what decides about its launches."""
    names = {each.name for each in fields(args) if each.metadata["option"].group in LAUNCHED_GROUPS}
    options = {name: getattr(args, name) for name in (names | LAUNCHED) - NOT_LAUNCHED}
    chosen: list[Any] = [(op, choice.name) for op, choice in plan.choices.items()]
    chosen += [(op, configs.describe()) for op, configs in plan.tile_configs.items()]
    facts = [options, chosen, plan.arch.name, asdict(plan.ranks), __version__, _triton()]
    return hashlib.sha256(json.dumps(facts, default=str, sort_keys=True).encode()).hexdigest()[:16]


def _triton() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""
