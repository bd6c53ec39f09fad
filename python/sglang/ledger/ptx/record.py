"""Executes every launch of a process, and notes what was executed in a file of lines."""

from __future__ import annotations

import json
import os
from pathlib import Path

from sglang.ledger.launch_form import kernel_name
from sglang.ledger.ptx.driver import Launch, executing

NOTES = "SGLANG_EXECUTE_NOTES"
"""Names the file to which each launch adds a line."""
_forever: list[object] = []


def execute_all_launches(arch: str) -> None:
    """Executes Triton's launches of this process from now on, as on `arch`."""
    path = os.environ.get(NOTES)

    def note(launch: Launch) -> None:
        if path:
            with Path(path).open("a") as file:
                file.write(json.dumps(line_of(launch)) + "\n")

    context = executing(arch, note)
    context.__enter__()
    _forever.append(context)  # it would end with the last reference


def line_of(launch: Launch) -> dict[str, object]:
    """Returns what is noted of a launch."""
    return {
        "kernel": kernel_name(launch.fn),
        "grid": launch.grid,
        "hash": launch.metadata.hash[:12],
        "test": os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0],
        "instructions": sum(launch.done.instructions.values()),
    }
