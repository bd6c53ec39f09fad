"""Which cases of a test `make test` runs.

The marker `pairs`: of the cases of a test, `make test` runs some that have each pair of values of its parameters
among them, `make thorough` the others. The marker `values`: some that have each value of its parameters.

Values are those of `parametrize` and of fixtures with `params`. Those that are named together, as in
`parametrize(("rows", "cols"), ...)`, are one; so a test needs three that vary for any case to be left out, and two
where each value is enough. In Triton's interpreter, which takes a second for a case, tests without a marker have
`values`.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest


def some(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Returns all cases, for `parametrize` over one argument; `make test` runs those in `quick`, `make thorough` the
    others. Raises ValueError if one of `quick` is no case: `make test` would run less than the file says."""
    return some_of(((case,) for case in cases), [(case,) for case in quick])


def some_of(cases: Iterable[tuple[Any, ...]], quick: Collection[tuple[Any, ...]]) -> list[Any]:
    """As `some`, over several arguments."""
    every = list(cases)
    others = [case for case in quick if case not in every]
    if others:
        raise ValueError(f"these are no cases, and so are not in `make test`: {others}")
    return [pytest.param(*case, marks=[] if case in quick else pytest.mark.thorough) for case in every]


def with_each_value(cases: Sequence[tuple[str, ...]], quick: Collection[tuple[str, ...]]) -> list[Any]:
    """As `some_of`; where a value is in no case of `quick`, `make test` runs a case with it too."""
    first = [cases.index(case) for case in quick if case in cases]
    return some_of(cases, {*quick, *(cases[index] for index in covering(cases, 1, first))})


TOGETHER = {"pairs": 2, "values": 1}
"""By marker: of how many parameters all values occur together."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def covering(cases: Sequence[Sequence[str]], together: int = 2, first: Iterable[int] = ()) -> set[int]:
    """Indices of cases, each a value for every parameter, in which each combination of the values of `together`
    parameters occurs that occurs at all, or of all parameters where there are fewer. The case with the most new ones
    comes next, the first of equals; `first` are there from the beginning.
    """
    groups = [frozenset(combinations(enumerate(case), min(together, len(case)))) for case in cases]
    missing = set().union(*groups)
    chosen = {*first}
    missing -= {group for index in chosen for group in groups[index]}
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
        together = together or [1] * INTERPRETED
        marked = together and not item.get_closest_marker("thorough")
        if marked and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            tests[item.nodeid.partition("[")[0], together[0]].append(item)
    for (_, number), of_test in tests.items():
        # The id has a part for each `parametrize`. Indices are no help: pytest numbers the cases anew.
        chosen = covering([item.callspec._idlist for item in of_test], number)
        for i, item in enumerate(of_test):
            if i not in chosen:
                item.add_marker(pytest.mark.thorough)
