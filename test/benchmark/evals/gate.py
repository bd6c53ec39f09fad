"""The gate for numeric regressions: held-out problems, through a server, against the record of the shipped model.

    python test/benchmark/evals/gate.py record      # after another model was installed
    python test/benchmark/evals/gate.py defects     # what it sees of every defect in the catalog, as Markdown

A model that has learnt its tasks well keeps its answers when a part of it is wrong, so right answers are not enough:
how sure it is of its tokens must also be what it was. In float32 on a CPU that is the same to five digits, whatever
the batch.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    ROOT = Path(__file__).resolve().parents[3]
    sys.path[:0] = [str(ROOT / folder) for folder in ("test", "benchmark/evals", "python")]

import bench_tiny
from benchmark.evals.defects import CATALOG, with_defect
from live_server import LiveServer, live_server

from sglang.embedded import DEFAULT_MODEL_PATH

SHIPPED = Path(DEFAULT_MODEL_PATH)
RECORD = Path(__file__).with_name("margins.json")
TASKS = (
    *("add", "subtract", "subtract_3_digits", "word_problem", "few_shot", "copy", "sort", "reverse", "facts", "json"),
    *("tool_qwen", "tool_deepseekv3"),
)
LIMIT = 8
NEEDLES = 4
MIN_RIGHT = 0.95
"""Of the sample, which is too small to measure the targets themselves."""
MAX_MOVED = 2e-4
"""Of a task's mean margin, relative to the record, in float32. (Computing in bfloat16 moves one by 5e-4.)"""


def problems() -> list[dict[str, Any]]:
    return [*bench_tiny.load(None, LIMIT, TASKS), *bench_tiny.load(None, NEEDLES, ["needle_2k"])]


def measure(server: LiveServer, items: list[dict[str, Any]]) -> bench_tiny.Report:
    return bench_tiny.evaluate(server.url, items, parallel=32, margins=True)


def recorded() -> dict[str, float]:
    """Task -> mean margin, nats."""
    found: dict[str, float] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def margins(report: bench_tiny.Report) -> dict[str, float]:
    """By task; 0 where no token was written."""
    return {task: score.margin or 0.0 for task, score in report.scores.items()}


def moved(report: bench_tiny.Report, record: dict[str, float]) -> tuple[str, float]:
    """The task whose margin is furthest from the record, and how far, relative."""
    found = margins(report)
    if found.keys() != record.keys():
        raise ValueError(f"the record has {sorted(record)}, the report {sorted(found)}: run `gate.py record`")
    by_task = {task: abs(found[task] / record[task] - 1) for task in record}
    return max(by_task.items(), key=lambda pair: pair[1])


def complaints(report: bench_tiny.Report, record: dict[str, float]) -> list[str]:
    """Empty: it passes."""
    whole, (task, far) = report.whole(), moved(report, record)
    found = [f"{whole.errors} requests failed"] if whole.errors else []
    if whole.share < MIN_RIGHT:
        found.append(f"{whole.right} of {whole.count} answers are right")
    if far > MAX_MOVED:
        found.append(f"the margin of {task} moved by {100 * far:.2f}%: something computes other numbers than it did")
    return found


def _record() -> None:
    with live_server() as server:
        report = measure(server, problems())
    print(report.table())
    rounded = {task: round(value, 4) for task, value in margins(report).items()}
    RECORD.write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")


def _defects() -> None:
    items, record = problems(), recorded()
    print(
        "| defect | right answers | margin moved most | caught by answers | caught by margins |\n|---|---|---|---|---|"
    )
    for name, defect in {"none": None, **CATALOG}.items():
        with tempfile.TemporaryDirectory() as folder:
            directory = SHIPPED if defect is None else with_defect(SHIPPED, Path(folder), defect)
            with live_server("--model-path", str(directory)) as server:
                report = measure(server, items)
        whole, (task, far) = report.whole(), moved(report, record)
        caught = ["yes" if fails else "no" for fails in (whole.share < MIN_RIGHT, far > MAX_MOVED)]
        print(
            f"| {name} | {whole.right} of {whole.count} | {100 * far:.2f}% ({task}) | {' | '.join(caught)} |",
            flush=True,
        )


if __name__ == "__main__":
    commands = {"record": _record, "defects": _defects}
    if len(sys.argv) != 2 or sys.argv[1] not in commands:
        raise SystemExit(f"usage: gate.py {' | '.join(commands)}")
    commands[sys.argv[1]]()
