"""Executes every launch of a process, and notes what was executed: a line for each form of a kernel's launches.

`scripts/execute_kernels.py` runs the kernels' tests so, each against the reference of its op, and makes
`executed.json` of the lines.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
from pathlib import Path
from typing import Any

from sglang.ledger.launch_form import Form, form_of, kernel_name
from sglang.ledger.ptx.driver import Launch, executing
from sglang.ledger.ptx.launch import Executed

NOTES = "SGLANG_EXECUTE_NOTES"
"""Names the file to which a process adds its lines when it ends."""
RECORD = Path(__file__).parents[1] / "executed.json"
FAULTS = RECORD.with_name("executed_faults.json")
"""How many faults executions noticed, by kind of kernel and of fault."""
_forever: list[object] = []


Line = dict[str, Any]
"""What is noted of a form: its kernel, the ledger's row that covers it, and what its launches did."""
_lines: dict[str, Line] = {}


def execute_all_launches(arch: str) -> None:
    """Executes Triton's launches of this process from now on, as on `arch`; notes them if the environment says so."""
    path = os.environ.get(NOTES)
    if path:
        _rows()  # read before a test puts something else in the place of a kernel

    def note(launch: Launch) -> None:
        key = launch.metadata.hash
        if key not in _lines:
            _lines[key] = line_of(launch)
        _add(_lines[key], launch.grid[0] * launch.grid[1] * launch.grid[2], launch.done)
        if launch.done.counts is not None:
            _count(_lines[key], launch)

    def counted(form: str, blocks: int) -> bool:
        return form not in _lines or blocks > _lines[form]["counted"]

    context = executing(arch, note if path else None, counted if path else None)
    context.__enter__()
    _forever.append(context)  # it would end with the last reference
    if path:
        atexit.register(lambda: _write(_lines, Path(path)))


def note_other(kernel: str, blocks: int, done: Executed) -> None:
    """Notes a launch of a kernel that is not Triton's."""
    _add(_lines.setdefault(kernel, _empty(kernel, kernel, "")), blocks, done)


def _add(line: Line, blocks: int, done: Executed) -> None:
    line["launches"] += 1
    line["blocks"] += blocks
    line["bytes"] += done.bytes_read + done.bytes_written
    line["choices"] += done.choices
    for form, count in done.instructions.items():
        line["instructions"][form] = line["instructions"].get(form, 0) + count


def _count(line: Line, launch: Launch) -> None:
    """Notes what a launch asked of a card's units, in the place of a smaller one's."""
    assert launch.done.counts is not None
    x, y, z = launch.grid
    line["counted"] = x * y * z
    threads = launch.metadata.num_warps * launch.metadata.warp_size
    line["counts"] = {"grid": [x, y, z], "threads": threads, **launch.done.counts.content()}


def form_of_launch(launch: Launch) -> Form:
    """Returns the form that the ledger compares with its rows."""
    source = launch.source
    compiled = {
        "constants": source.constants,
        "signature": source.signature,
        "configs": [source.attrs],
        "num_warps": launch.metadata.num_warps,
        "num_stages": launch.metadata.num_stages,
    }
    return form_of(source.fn, compiled)


def _write(lines: dict[str, Line], path: Path) -> None:
    with path.open("a") as file:
        for line in lines.values():
            file.write(json.dumps(line) + "\n")


def line_of(launch: Launch) -> Line:
    """Returns the line of a form before its first launch."""
    form = form_of_launch(launch)
    row = _rows().row_of(form)
    return _empty(kernel_name(form.fn), launch.metadata.hash[:12], "/".join(row) if row else "")


def _empty(kernel: str, form: str, row: str) -> Line:
    figures = {"launches": 0, "blocks": 0, "bytes": 0, "choices": 0, "counted": 0}
    return {"kernel": kernel, "form": form, "row": row, **figures, "instructions": {}, "counts": {}}


@functools.cache
def _rows() -> Any:
    from sglang.ledger.coverage import coverage

    return coverage("sm120")
