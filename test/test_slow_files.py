"""The summary of slow files: what it adds up, and when it says nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import slow_files


def summary(num_files: int) -> list[str]:
    plugin, lines = slow_files.SlowFiles(), []
    for number in range(num_files):
        for duration in (0.5, float(number)):
            report: Any = SimpleNamespace(nodeid=f"test/test_{number}.py::test_it", duration=duration)
            plugin.pytest_runtest_logreport(report)
    reporter: Any = SimpleNamespace(section=lines.append, write_line=lines.append)
    plugin.pytest_terminal_summary(reporter)
    return lines


def test_the_slowest_files_come_first() -> None:
    title, first, *_, last = summary(slow_files.MANY_FILES)
    assert title.startswith("5,000 s of tests") and first.split() == ["100", "s", "test/test_99.py"]
    assert last.split()[-1] == "test/test_70.py"


@pytest.mark.parametrize("num_files", [1, slow_files.MANY_FILES - 1])
def test_short_runs_print_nothing(num_files: int) -> None:
    assert summary(num_files) == []
