"""A budget of thoughts ends them at that token, and leaves everything else alone."""

from __future__ import annotations

import numpy as np
import pytest

from sglang.srt.sampling.thinking_budget import ThinkingBudget
from sglang.srt.sampling.thoughts import Thoughts

BEGIN, END = 40, 70


def allowed(thoughts: Thoughts, row: np.ndarray | None = None) -> list[int]:
    row = np.full(4, -1, np.int32) if row is None else row
    thoughts.restrict(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("inside", [True, False])
def test_the_end_is_the_only_token_when_the_budget_is_used_up(budget: int, inside: bool) -> None:
    thoughts = Thoughts(ThinkingBudget(budget, BEGIN, END, inside))
    if not inside:
        assert len(allowed(thoughts)) == 128
        thoughts.push(BEGIN)
    for i in range(budget):
        assert len(allowed(thoughts)) == 128
        thoughts.push(i)
    assert allowed(thoughts) == [END]
    thoughts.push(END)
    for i in range(9):
        assert len(allowed(thoughts)) == 128 and not thoughts.may_end_within(100)
        thoughts.push(i)


def test_thoughts_that_end_in_time_are_not_touched() -> None:
    thoughts = Thoughts(ThinkingBudget(3, BEGIN, END, inside=True))
    for token in (1, END, 2, 3, 4, 5, 6):
        thoughts.push(token)
        assert len(allowed(thoughts)) == 128


def test_an_output_without_thoughts_is_not_touched() -> None:
    thoughts = Thoughts(ThinkingBudget(0, BEGIN, END, inside=False))
    for token in (1, 2, 3):
        thoughts.push(token)
        assert len(allowed(thoughts)) == 128


def test_what_a_grammar_forbids_stays_forbidden() -> None:
    thoughts = Thoughts(ThinkingBudget(0, BEGIN, END, inside=True))
    row = np.array([6, 0, 0, 0], np.int32)
    assert allowed(thoughts, row) == [1, 2]


def test_steps_in_flight_may_reach_the_budget() -> None:
    thoughts = Thoughts(ThinkingBudget(3, BEGIN, END, inside=True))
    thoughts.push(1)
    assert not thoughts.may_end_within(1) and thoughts.may_end_within(2)
