"""How long the thoughts of an answer may be, as it travels with a request."""

from __future__ import annotations

import msgspec


class ThinkingBudget(msgspec.Struct, frozen=True):
    """`tokens`: at most so many thoughts. `begin` and `end` are the tokens around them; `inside`: the prompt has the
    first one already."""

    tokens: int
    begin: int
    end: int
    inside: bool
