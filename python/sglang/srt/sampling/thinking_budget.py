"""The limit of the thoughts of an answer, as it travels with a request."""

from __future__ import annotations

import msgspec


class ThinkingBudget(msgspec.Struct, frozen=True):
    """`tokens`: at most so many thoughts. `begin` and `end`: the tokens that spell the marks around them; most formats
    have one token for each. `inside`: the prompt has the first mark already."""

    tokens: int
    begin: list[int]
    end: list[int]
    inside: bool
