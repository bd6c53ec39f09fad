"""Limit of the thinking tokens of an answer, in the form that travels with a request."""

from __future__ import annotations

import msgspec


class ThinkingBudget(msgspec.Struct, frozen=True):
    """`tokens`: most thinking tokens. `begin` and `end`: the tokens of the marks around them, one each in most formats.
    `inside`: the prompt contains the first mark already."""

    tokens: int
    begin: list[int]
    end: list[int]
    inside: bool
