"""Prints the seconds that tests took in all, and the files that took longest, at the end of a run of many files."""

from __future__ import annotations

from collections import Counter

import pytest

SHOWN = 30
MANY_FILES = 100
"""Shorter runs, such as those of one package, print nothing."""


class SlowFiles:
    """Adds up set-up, call and tear-down of each test by file; with xdist, in the process that collects the reports."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if len(self.seconds) < MANY_FILES:
            return
        terminalreporter.section(f"{self.seconds.total():,.0f} s of tests; the {SHOWN} slowest files")
        for name, seconds in self.seconds.most_common(SHOWN):
            terminalreporter.write_line(f"{seconds:6.0f} s  {name}")
