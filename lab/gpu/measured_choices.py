"""Measured choices against the tables' on four models' shapes, and from another GPU's tables.

    python lab/gpu/measured_choices.py [--seconds 110] [--model qwen3_moe]     # GPU; nine minutes for all
    python lab/gpu/measured_choices.py --batches [--model qwen3_moe]           # GPU; after the first, with its records

The first measures what `sglang tune` would, with what an RTX 5090's tables and tuning files choose as one more
candidate of each question. It prints, for each model, a line such as

    qwen3_moe: 30 of 41 sizes, 6 changed, 0 failed: 0.962 of the tables' time; from rtx-5090's tables 0.71 -> 0.99

The first ratio is the time of the measured choices over that of this GPU's own tables, over all sizes with the weights
of their shares of steps: at most 1. The last two are the share of this GPU's own tables' rate that the other tables
give, and that measured choices find from there: at least 0.95. Choices that changed are then timed once more, in new
processes: none may be more than 1% slower than the tables'. It exits with 1 if one of these does not hold.

`--batches` times whole decode steps and prompts of the same models (random weights, the first layers of GLM-4.7) with
measured choices and with --no-measured-choices, three times in turn: no ratio may be below 0.99.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sglang.explain import Explanation, explain
from sglang.measuring.plan_points import points_of
from sglang.measuring.points import Point
from sglang.measuring.rounds import Bench, Clock, measure
from sglang.measuring.tune import Target, target_here
from sglang.srt.hardware.arch import ArchTraits, arch_by_name
from sglang.srt.kernels.measured.decision import decide
from sglang.srt.kernels.measured.records import Record
from sglang.srt.kernels.measured.store import add
from sglang.srt.server_args import ServerArgs

CONFIGS = Path(__file__).parents[2] / "test" / "srt" / "kernels" / "configs"
MODELS = {"qwen3": {}, "qwen3_moe": {}, "gpt_oss": {}, "glm47": {"num_hidden_layers": 9}}
"""Configs, and keys that are changed: GLM-4.7 has 92 layers."""
OTHER = "rtx-5090"
FOUND_BACK, SLOWER = 0.95, 1.01
REPEAT_SECONDS = 20.0
BATCHES = ("--batch-size", "1", "16", "64", "--input-len", "1024", "--output-len", "32")


@dataclass(frozen=True, slots=True)
class Asked:
    """A point, and the name of what the other GPU's tables choose for it."""

    point: Point
    other: str


def asked_points(args: ServerArgs, arch: ArchTraits, other: ArchTraits) -> tuple[Asked, ...]:
    """Returns the points on this GPU, with the other one's choice as the last candidate."""
    others = {point.question: point for point in points_of(_explained(args, limited(other, arch)))}
    asked = []
    for point in points_of(_explained(args, arch)):
        theirs = others.get(point.question, point).candidates[0]
        if theirs.name not in {each.name for each in point.candidates}:
            point = replace(point, candidates=(*point.candidates, theirs))
        asked.append(Asked(point, theirs.name))
    return tuple(asked)


def limited(other: ArchTraits, arch: ArchTraits) -> ArchTraits:
    """Returns the other GPU without the instructions that this one does not have, as SGLANG_FORCE_ARCH would."""
    return replace(other, features=other.features & arch.features)


def _explained(args: ServerArgs, arch: ArchTraits) -> Explanation:
    return explain(args, arch, frozenset({"triton"}), 1 << 40, advises=False)


@dataclass(frozen=True, slots=True)
class Row:
    """The seconds of one question: by this GPU's tables, as measured, by the other's tables, and as measured from
    there; `weight`: the point's value."""

    weight: float
    table: float
    chosen: float
    other: float
    from_other: float
    changed: bool
    failed: int


def row_of(asked: Asked, records: Sequence[Record]) -> Row | None:
    """Returns the row of a measured point; None if one of the tables' choices could not be timed."""
    by_name = {record.candidate: record for record in records}
    decision, from_other = decide(records[0].candidate, by_name), decide(asked.other, by_name)
    if decision is None or from_other is None:
        return None
    return Row(
        asked.point.value, decision.table.seconds, decision.chosen.seconds, from_other.table.seconds,
        from_other.chosen.seconds, decision.changes, sum(bool(record.problem) for record in records),
    )  # fmt: skip


def summary(rows: Sequence[Row]) -> tuple[float, float, float]:
    """Returns the three ratios of a line: measured over tables, other tables' share, share found from there."""
    weights = sum(row.weight for row in rows)

    def mean(ratio: Callable[[Row], float]) -> float:
        return sum(row.weight * ratio(row) for row in rows) / weights

    found = 1.0 / mean(lambda row: row.from_other / row.table)
    return mean(lambda row: row.chosen / row.table), 1.0 / mean(lambda row: row.other / row.table), found


def measured_rows(
    asked: Sequence[Asked], bench: Bench, seconds: float, keep: Callable[[Sequence[Record]], None], clock: Clock
) -> Iterator[tuple[Asked, Row]]:
    """Yields the rows of points that were measured within the seconds."""
    by_question = {each.point.question: each for each in asked}
    for records in measure((each.point for each in asked), bench, seconds, clock):
        keep(records)
        each = by_question[records[0].question]
        row = row_of(each, records)
        if row is not None:
            yield each, row


def slower_again(changed: Sequence[Asked], bench: Bench, choice: dict[str, str], clock: Clock) -> list[str]:
    """Times the choices that changed once more, and returns a line for each that is more than 1% slower than the
    tables'. choice: of each question's text."""
    points = []
    for each in changed:
        chosen = choice[str(each.point.question)]
        pair = (each.point.candidates[0], *(c for c in each.point.candidates if c.name == chosen))
        points.append(replace(each.point, candidates=pair))
    lines = []
    for table, chosen_record in measure(points, bench, REPEAT_SECONDS, clock):
        if chosen_record.seconds > SLOWER * table.seconds:
            lines.append(f"{chosen_record.question}: {chosen_record} where the tables' takes {table}")
    return lines


def write_config(name: str, folder: Path) -> ServerArgs:
    """Writes a model's config and returns the flags of a server for it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((CONFIGS / f"{name}.json").read_text()) | MODELS[name]
    (folder / "config.json").write_text(json.dumps(config))
    return ServerArgs.from_kwargs(model_path=str(folder), load_format="dummy")


def shapes(name: str, target: Target, seconds: float, folder: Path) -> bool:
    """Runs the first part for one model. Returns whether all holds."""
    asked = asked_points(write_config(name, folder), target.arch, arch_by_name(OTHER))
    choice: dict[str, str] = {}

    def keep(records: Sequence[Record]) -> None:
        problem = add(target.setting, records)
        assert problem is None, problem
        decision = decide(records[0].candidate, {record.candidate: record for record in records})
        if decision is not None and decision.changes:
            choice[str(records[0].question)] = decision.chosen.candidate

    with target.bench() as bench:
        rows = list(measured_rows(asked, bench, seconds, keep, time.monotonic))
    if not rows:
        print(f"{name}: nothing was measured")
        return False
    ratio, theirs, found = summary([row for _, row in rows])
    changed, failed = sum(row.changed for _, row in rows), sum(row.failed for _, row in rows)
    print(
        f"{name}: {len(rows)} of {len(asked)} sizes, {changed} changed, {failed} failed: {ratio:.3f} of the tables'"
        f" time; from {OTHER}'s tables {theirs:.2f} -> {found:.2f}",
        flush=True,
    )
    with target.bench() as bench:
        slower = slower_again([each for each, row in rows if row.changed], bench, choice, time.monotonic)
    print("\n".join(slower), end="\n" * bool(slower), flush=True)
    return not slower and ratio <= 1.0 and found >= FOUND_BACK


def batches(names: Sequence[str], folder: Path) -> int:
    """Runs the second part: prints what `sglang.bench_one_batch` says with and without measured choices, in turn.
    Returns the exit status."""
    status = 0
    for name in names:
        write_config(name, folder / name)
        command = [sys.executable, "-m", "sglang.bench_one_batch", "--model-path", str(folder / name)]
        command += ["--load-format", "dummy", *BATCHES]
        for turn in range(3):
            for flags in ([], ["--no-measured-choices"]):
                done = subprocess.run([*command, *flags], capture_output=True, text=True)
                print(f"--- {name}, turn {turn}, {' '.join(flags) or 'measured'}\n{done.stdout}", flush=True)
                status = max(status, done.returncode)
    return status


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=95.0, help="for each model")
    parser.add_argument("--model", action="append", default=[], choices=tuple(MODELS))
    parser.add_argument("--batches", action="store_true")
    options = parser.parse_args()
    names = options.model or tuple(MODELS)
    with tempfile.TemporaryDirectory() as folder:
        if options.batches:
            return batches(names, Path(folder))
        target = target_here(0)
        results = [shapes(name, target, options.seconds, Path(folder) / name) for name in names]
        return int(not all(results))


if __name__ == "__main__":
    raise SystemExit(main())
