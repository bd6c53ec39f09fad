"""Scores as a Markdown table, from the record of a training run or a report of bench_tiny."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def shares(record: dict[str, Any]) -> dict[str, float]:
    """Raises ValueError if it is neither."""
    if "tasks" in record and "targets" in record:
        return {task: row["score"] for task, row in record["tasks"].items()}
    if "scores" in record:
        return dict(record["scores"])
    raise ValueError("neither a training.json nor a report of bench_tiny")


def table(files: Iterable[Path]) -> str:
    """One column a file, named after it, in percent."""
    columns = {path.stem: shares(json.loads(path.read_text(encoding="utf-8"))) for path in files}
    tasks = list(dict.fromkeys(task for column in columns.values() for task in column))
    lines = ["| task | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for task in tasks:
        cells = [f"{100 * column[task]:.1f}" if task in column else "" for column in columns.values()]
        lines.append(f"| {task} | " + " | ".join(cells) + " |")
    means = [f"{100 * sum(column.values()) / len(column):.1f}" for column in columns.values()]
    lines.append("| mean | " + " | ".join(means) + " |")
    return "\n".join(lines)
