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
    thoughts = Thoughts(ThinkingBudget(budget, [BEGIN], [END], inside))
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
    thoughts = Thoughts(ThinkingBudget(3, [BEGIN], [END], inside=True))
    for token in (1, END, 2, 3, 4, 5, 6):
        thoughts.push(token)
        assert len(allowed(thoughts)) == 128


def test_an_output_without_thoughts_is_not_touched() -> None:
    thoughts = Thoughts(ThinkingBudget(0, [BEGIN], [END], inside=False))
    for token in (1, 2, 3):
        thoughts.push(token)
        assert len(allowed(thoughts)) == 128


def test_what_a_grammar_forbids_stays_forbidden() -> None:
    thoughts = Thoughts(ThinkingBudget(0, [BEGIN], [END], inside=True))
    row = np.array([6, 0, 0, 0], np.int32)
    assert allowed(thoughts, row) == [1, 2]


def test_steps_in_flight_may_reach_the_budget() -> None:
    thoughts = Thoughts(ThinkingBudget(3, [BEGIN], [END], inside=True))
    thoughts.push(1)
    assert not thoughts.may_end_within(1) and thoughts.may_end_within(2)


def test_a_mark_of_several_tokens_is_spelled_token_by_token() -> None:
    thoughts = Thoughts(ThinkingBudget(2, [10, 11], [20, 21, 22], inside=False))
    for token in (10, 11, 1, 2):
        assert len(allowed(thoughts)) == 128
        thoughts.push(token)
    for token in (20, 21, 22):
        assert allowed(thoughts) == [token] and not thoughts.over
        thoughts.push(token)
    assert thoughts.over and len(allowed(thoughts)) == 128


def test_an_end_that_is_joined_to_a_line_break_counts() -> None:
    """`</`, `think`, `>` and a line break in one token."""
    thoughts = Thoughts(ThinkingBudget(2, [10], [20, 21, 22], inside=True))
    for token in (1, 20, 21, 99):
        thoughts.push(token)
    assert thoughts.over


def test_an_end_that_has_begun_is_finished() -> None:
    thoughts = Thoughts(ThinkingBudget(2, [10], [20, 21, 22], inside=True))
    for token in (1, 20):
        thoughts.push(token)
    assert allowed(thoughts) == [21]
