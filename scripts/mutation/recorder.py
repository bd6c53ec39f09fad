"""A plugin of pytest, named with `-p mutation.recorder`: which tests run which lines, and what came of each test.

Environment variables name its files:

MUTATION_LINES    JSON {module: [line, ...]}; the lines to look for. Without it nothing is traced.
MUTATION_ONLY     JSON [node id, ...]; the tests to run, of those that are collected. Without it all.
MUTATION_RECORD   written at the end: {"seconds": {node id: s}, "failed": [node id, ...], "lines": {module: {line:
                  [number, ...]}}, "processes": whether ranks were started}. A number is the place of a node id in
                  "seconds"; -1 stands for what ran outside of tests, as imports do.
MUTATION_SECONDS  after so many the session ends with the test that runs then.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

BEGAN = time.monotonic()


def read(variable: str) -> Any:
    path = os.environ.get(variable)
    return None if path is None else json.loads(Path(path).read_text())


class Recorder:
    def __init__(self, root: Path) -> None:
        self.root, self.lines, self.only = root, read("MUTATION_LINES"), read("MUTATION_ONLY")
        self.limit_s = float(os.environ.get("MUTATION_SECONDS", "inf"))
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []
        self.coverage: Any = None
        if self.lines is not None:
            import coverage

            self.coverage = coverage.Coverage(data_file=None, include=[str(root / module) for module in self.lines])
            self.coverage.start()

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self.only is not None:
            chosen = set(self.only)
            config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
            items[:] = [item for item in items if item.nodeid in chosen]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        if self.coverage is not None:
            self.coverage.switch_context(item.nodeid)
        began = time.monotonic()
        result = yield
        self.seconds[item.nodeid] = time.monotonic() - began
        if time.monotonic() - BEGAN > self.limit_s:
            item.session.shouldstop = "its time is over"
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)

    def lines_of(self, module: str) -> dict[str, list[int]]:
        ran = self.coverage.get_data().contexts_by_lineno(str(self.root / module))
        numbers = {"": -1} | {test: number for number, test in enumerate(self.seconds)}
        return {str(line): sorted(numbers[test] for test in ran[line]) for line in self.lines[module] if line in ran}

    def pytest_sessionfinish(self) -> None:
        processes = "rank_processes" in sys.modules
        record: dict[str, Any] = {"seconds": self.seconds, "failed": self.failed, "lines": {}, "processes": processes}
        if self.coverage is not None:
            self.coverage.stop()
            record["lines"] = {module: self.lines_of(module) for module in self.lines}
        Path(os.environ["MUTATION_RECORD"]).write_text(json.dumps(record))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder(config.rootpath), "mutation_recorder")
