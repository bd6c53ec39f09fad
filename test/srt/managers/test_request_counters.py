"""What a request's counters say about its next step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.managers.scheduler.schedule_batch import Req


@pytest.mark.parametrize(("planned_len", "unknown"), [(9, 0), (12, 3)])
def test_thoughts_are_asked_about_the_tokens_that_are_not_known_yet(planned_len: int, unknown: int) -> None:
    asked: list[int] = []
    thoughts = SimpleNamespace(may_end_within=lambda num: asked.append(num) or num > 2)
    req: Any = SimpleNamespace(grammar=None, thoughts=thoughts, planned_len=planned_len, tokens=[0] * 8)
    assert Req.needs_mask.fget(req) == (unknown > 2) and asked == [unknown]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("hidden", "width"), [(None, 4), (object(), 1)])
def test_hidden_states_are_of_one_token_a_step(hidden: object, width: int) -> None:
    req: Any = SimpleNamespace(hidden=hidden)
    assert Req.max_width(req, 4) == width


@pytest.mark.parametrize("asks", [(), ("wants_prompt_logprobs",), ("hidden",), ("media",)])
def test_steps_may_be_computed_again_if_only_tokens_are_read(asks: tuple[str, ...]) -> None:
    nothing = {"wants_prompt_logprobs": False, "hidden": None, "media": None}
    req: Any = SimpleNamespace(**nothing | dict.fromkeys(asks, True))
    assert Req.may_be_stale.fget(req) == (not asks)  # type: ignore[attr-defined]
