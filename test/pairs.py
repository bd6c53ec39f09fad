"""Which cases of a test `make test` runs.

The marker `pairs`: of the cases of a test, `make test` runs some that have each pair of values of its parameters
among them, `make thorough` the others.

Values are those of `parametrize` and of fixtures with `params`. Those that are named together, as in
`parametrize(("rows", "cols"), ...)`, are one; so a test needs three that vary for any case to be left out.
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


def covering(cases: Sequence[Sequence[str]]) -> set[int]:
    """Indices of cases, each a value for every parameter, in which each pair of values occurs that occurs at all, or
    each value where there is one parameter. The case with the most new pairs comes next, the first of equals.
    """
    pairs = [frozenset(combinations(enumerate(case), min(2, len(case)))) for case in cases]
    missing = set().union(*pairs)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(cases)), key=lambda i: len(pairs[i] & missing))
        missing -= pairs[best]
        chosen.add(best)
    return chosen


def mark_others(items: Sequence[pytest.Item]) -> None:
    """Marks `thorough` what need not run in `make test`. Cases that have that mark already do not count."""
    tests: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        marked = item.get_closest_marker("pairs") and not item.get_closest_marker("thorough")
        if marked and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for of_test in tests.values():
        # The id has a part for each `parametrize`. Indices are no help: pytest numbers the cases anew.
        chosen = covering([item.callspec._idlist for item in of_test])
        for i, item in enumerate(of_test):
            if i not in chosen:
                item.add_marker(pytest.mark.thorough)
