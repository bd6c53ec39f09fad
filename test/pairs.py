"""Which cases of a test `make test` runs.

The marker `pairs`: of the cases of a test, `make test` runs some that have each pair of values of its parameters
among them, `make thorough` the others. The marker `values`: some that have each value of its parameters.

Values are those of `parametrize` and of fixtures with `params`. Those that are named together, as in
`parametrize(("rows", "cols"), ...)`, are one; so a test needs three that vary for any case to be left out, and two
where each value is enough.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest


def some(cases: Iterable[Any], quick: Container[Any]) -> list[Any]:
    """All cases, for `parametrize` over one argument; `make test` runs those in `quick`, `make thorough` the others."""
    return [pytest.param(case, marks=[] if case in quick else pytest.mark.thorough) for case in cases]


def some_of(cases: Iterable[tuple[Any, ...]], quick: Container[Any]) -> list[Any]:
    """As `some`, over several arguments."""
    return [pytest.param(*case, marks=[] if case in quick else pytest.mark.thorough) for case in cases]


TOGETHER = {"pairs": 2, "values": 1}
"""By marker: of how many parameters all values occur together."""


def covering(cases: Sequence[Sequence[str]], together: int = 2) -> set[int]:
    """Indices of cases, each a value for every parameter, in which each combination of the values of `together`
    parameters occurs that occurs at all, or of all parameters where there are fewer. The case with the most new ones
    comes next, the first of equals.
    """
    groups = [frozenset(combinations(enumerate(case), min(together, len(case)))) for case in cases]
    missing = set().union(*groups)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(cases)), key=lambda i: len(groups[i] & missing))
        missing -= groups[best]
        chosen.add(best)
    return chosen


def mark_others(items: Sequence[pytest.Item]) -> None:
    """Marks `thorough` what need not run in `make test`. Cases that have that mark already do not count."""
    tests: dict[tuple[str, int], list[pytest.Function]] = defaultdict(list)
    for item in items:
        together = [number for name, number in TOGETHER.items() if item.get_closest_marker(name)]
        marked = together and not item.get_closest_marker("thorough")
        if marked and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            tests[item.nodeid.partition("[")[0], together[0]].append(item)
    for (_, number), of_test in tests.items():
        # The id has a part for each `parametrize`. Indices are no help: pytest numbers the cases anew.
        chosen = covering([item.callspec._idlist for item in of_test], number)
        for i, item in enumerate(of_test):
            if i not in chosen:
                item.add_marker(pytest.mark.thorough)
