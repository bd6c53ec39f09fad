"""gpu/measured_choices.py with a faked GPU, on which each candidate takes the predicted time."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from sglang.measuring.points import Candidate, Point
from sglang.srt.hardware.arch import arch_by_name

PATH = Path(__file__).parents[1] / "gpu" / "measured_choices.py"
spec = importlib.util.spec_from_file_location("measured_choices", PATH)
assert spec is not None and spec.loader is not None
script = importlib.util.module_from_spec(spec)
sys.modules["measured_choices"] = script
spec.loader.exec_module(script)


class Predicted:
    """A bench whose candidates take what is predicted."""

    def open(self, point: Point, candidate: Candidate, limit_s: float) -> Predicted.Timer:
        return Predicted.Timer(candidate.predicted or 1e-4)

    class Timer:
        def __init__(self, value: float) -> None:
            self._value = value

        def seconds(self, limit_s: float) -> float:
            return self._value

        def close(self) -> None: ...


@pytest.mark.parametrize("name", ["qwen3_moe", "glm47"])
def test_other_tables_are_left_for_what_is_faster_here(name: str, tmp_path: Path) -> None:
    args, arch = script.write_config(name, tmp_path), arch_by_name("h200")
    asked = script.asked_points(args, arch, arch_by_name(script.OTHER))
    assert len(asked) > 20 and any(each.other != each.point.candidates[0].name for each in asked)
    rows = [row for _, row in script.measured_rows(asked, Predicted(), 1e9, lambda records: None, lambda: 0.0)]
    assert len(rows) == len(asked)
    ratio, theirs, found = script.summary(rows)
    assert ratio <= 1.0 and found >= script.FOUND_BACK and found >= theirs
    changed = [each for each, row in zip(asked, rows, strict=True) if row.changed]
    choice = {
        str(each.point.question): min(each.point.candidates, key=lambda c: c.predicted or 1e-4).name
        for each in changed
    }  # fmt: skip
    assert script.slower_again(changed, Predicted(), choice, lambda: 0.0) == []
