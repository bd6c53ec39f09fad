"""A plugin of pytest for runs that may end early: each test's first case comes before the others, then each one's last,
which differs in all parameters.

No test begins after as many seconds as the environment says; those that have begun end.
"""

from __future__ import annotations

import os
import time
from collections import Counter

import pytest

SECONDS = "FIRST_CASES_SECONDS"


class FirstCases:
    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @pytest.hookimpl(trylast=True)  # of the cases that are left
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = by_case(items)

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if time.monotonic() > self._end:
            item.session.shouldstop = "the time is over"


def by_case(items: list[pytest.Item]) -> list[pytest.Item]:
    """Returns the items with the first one of each function first, then each one's last, second, last but one, ..."""
    functions = [item.nodeid.partition("[")[0] for item in items]
    cases, seen = Counter(functions), Counter[str]()
    turns = []
    for function in functions:
        i, behind = seen[function], cases[function] - 1 - seen[function]
        turns.append(2 * i if i <= behind else 2 * behind + 1)
        seen[function] += 1
    return [items[i] for i in sorted(range(len(items)), key=turns.__getitem__)]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FirstCases(float(os.environ.get(SECONDS, "inf"))))
