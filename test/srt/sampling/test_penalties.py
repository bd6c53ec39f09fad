"""The token counts behind penalties: how many rows there are at once."""

from __future__ import annotations

import itertools

import pytest
import torch

from sglang.srt.sampling.penalties import PenaltyState


@pytest.mark.parametrize("max_rows", [1, 2, 9, 15, 16, 17, 100, 1025])
def test_growth_stays_within_what_the_memory_plan_counts(max_rows: int) -> None:
    """`plan.memory.penalty_bytes`: all rows, and half as many while they are copied."""
    state = PenaltyState(4, torch.device("cpu"), max_rows)
    sizes = [0]
    for token in range(max_rows - 1):
        state.acquire([token % 4], [])
        state.flush()
        if state.state.shape[0] != sizes[-1]:
            sizes.append(state.state.shape[0])
    assert all(old + new <= max_rows + max_rows // 2 for old, new in itertools.pairwise(sizes))
    assert sizes[-1] <= max_rows and (max_rows == 1 or sizes[-1] >= 2)


def test_rows_keep_their_counts_when_the_table_grows() -> None:
    state = PenaltyState(8, torch.device("cpu"), 40)
    first = state.acquire([1], [2, 2])
    state.flush()
    rows = [state.acquire([i % 8], [3]) for i in range(39)][:-1]
    state.flush()
    assert state.state[first, 2] == 2 and all(int(state.state[row, 3]) & 1 for row in rows)
