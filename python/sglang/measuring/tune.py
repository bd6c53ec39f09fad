"""Measures a model's kernels and tiles on this machine's GPU, and keeps what it finds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang.explain import explain
from sglang.measuring.plan_points import points_of
from sglang.measuring.points import Point
from sglang.measuring.processes import ProcessBench
from sglang.measuring.rounds import Bench, Clock, measure
from sglang.srt.environ import envs
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import ArchTraits, current_arch, free_memory_bytes
from sglang.srt.kernels.measured.decision import LEAST_ROUNDS, decide
from sglang.srt.kernels.measured.records import Record, Setting
from sglang.srt.kernels.measured.setting import setting_here
from sglang.srt.kernels.measured.store import add, path_of, read, why_not_kept
from sglang.srt.kernels.resolve import installed_packages
from sglang.srt.server_args import ServerArgs

FREE = 0.85
"""Share of the GPU's memory that must be free: times beside another server's requests are not those of an idle GPU."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Target:
    """The GPU that is measured, its setting, and what runs candidates on it."""

    arch: ArchTraits
    setting: Setting
    bench: Callable[[], ProcessBench]


def target_here(gpu: int) -> Target:
    """Returns a CUDA device of this machine. Raises UserError where it cannot be measured, or nothing can be kept."""
    if envs.SGLANG_FORCE_ARCH is not None:
        raise UserError("SGLANG_FORCE_ARCH is set: what is measured belongs to the GPU that is here. Unset it.")
    arch = current_arch(gpu, "cuda")
    setting = setting_here(gpu)
    if setting is None:
        raise UserError(
            "nvidia-smi does not say the driver, power limit and clocks of the GPU, by which measured times are kept."
        )
    problem = why_not_kept(setting)
    if problem is not None:
        raise UserError(
            f"What is measured could not be kept: {problem}. Name a directory that can be written with"
            " SGLANG_CACHE_DIR."
        )
    if not arch.unified_memory and free_memory_bytes(gpu) < FREE * arch.memory:
        raise UserError("The GPU is in use: nothing is measured beside other work. End it first (nvidia-smi shows it).")
    from sglang.measuring.launcher import GpuLauncher

    launcher = GpuLauncher(arch, gpu)
    return Target(arch, setting, lambda: ProcessBench(launcher, ["sglang.measuring.launcher"]))


def tune(args: ServerArgs, target: Target, seconds: float, say: Say, again: bool = False) -> int:
    """Measures what a server with these flags would launch, the most valuable first, for at most `seconds`. Returns
    the number of questions that were answered. again: also those that were answered before. An interrupt ends it; what
    was measured is kept. Raises UserError for a model that cannot be read."""
    say(f"Measuring on {target.setting.gpu} for up to {seconds:.0f} s.")
    begin = time.monotonic()
    explanation = explain(args, target.arch, installed_packages(), advises=False)
    if explanation.problem is not None:
        raise UserError(explanation.problem)
    points = points_of(explanation)
    todo = points if again else unanswered(points, target.setting)
    if not todo:
        say("Everything that this model launches was measured before." if points else "Nothing to choose here.")
        return 0
    with target.bench() as bench:
        count = run(todo, bench, target.setting, seconds - (time.monotonic() - begin), say)
    say(f"{count} of {len(todo)} sizes measured. They are kept in {path_of(target.setting)}.")
    return count


def unanswered(points: Sequence[Point], setting: Setting) -> tuple[Point, ...]:
    """Returns the points of whose tables' choice there is no record that decides."""
    known = {key for key, record in read(setting).items() if record.problem or len(record.rounds) >= LEAST_ROUNDS}
    return tuple(point for point in points if (point.question, point.candidates[0].name) not in known)


def run(
    points: Sequence[Point],
    bench: Bench,
    setting: Setting,
    seconds: float,
    say: Say,
    clock: Clock = time.monotonic,
) -> int:
    """Measures points and keeps the records of each at once. Returns their number."""
    count = 0
    try:
        for records in measure(points, bench, seconds, clock):
            problem = add(setting, records)
            if problem is not None:
                say(f"What was measured could not be kept: {problem}. Measuring ends.")
                break
            count += 1
            say(line_of(records))
    except KeyboardInterrupt:
        say("Interrupted.")
    return count


def line_of(records: Sequence[Record]) -> str:
    """Returns a line about one question: its candidates' times, and what they decide. The tables' choice comes
    first."""
    question, table = records[0].question, records[0].candidate
    decision = decide(table, {record.candidate: record for record in records})
    size = f"{question.op} {question.scheme} {question.sizes}"
    size += f", {question.tokens} tokens" if question.tokens else ""
    if decision is None:
        return f"{size}: the table's choice was not timed: {records[0].problem}"
    failed = sum(bool(record.problem) for record in records)
    tried = f"{len(records)} candidates" + (f", {failed} failed" if failed else "")
    verdict = f"{decision.chosen.candidate} instead" if decision.changes else "the table's choice stays"
    return f"{size} ({tried}): {decision}: {verdict}"
