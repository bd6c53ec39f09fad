"""How many positions the rotary tables have: all of the context, or as many as a request can come to.

A request's tokens lie in the pool, and what has no place there is padding, at position 0. So where the context is much
longer than the pool, as Llama 4's of 10 million tokens is, most of a table for all of it (5 GiB) would never be read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sglang.srt.plan.pool_sizes import CacheCost, plan_pools

FEWEST = 1 << 18
"""Shorter contexts have all of their positions: more than steps of the warm-up reach, in 128 MiB at most as a rule."""
SPARE = 1024
"""Positions beyond the pool's tokens: a draft's draft token may be looked up behind the last token of a request."""


def num_positions(context_len: int, step_tokens: int, pool_tokens: Callable[[], int]) -> int:
    """Returns the positions of tables. step_tokens: the most of a step. pool_tokens(): the most that the pool can have,
    asked only where the answer depends on it."""
    if context_len <= max(FEWEST, step_tokens) + SPARE:
        return context_len
    return min(context_len, max(FEWEST, step_tokens, pool_tokens()) + SPARE)


def tokens_beside_rows(cost: CacheCost, room: int, row_bytes: int, page_size: int, max_tokens: int) -> int:
    """Returns the tokens of the pool, the padding page included, where `room` is for it and for a row of `row_bytes` in
    tables for each of its tokens."""
    together = replace(cost, bytes_per_token=cost.bytes_per_token + row_bytes)
    return plan_pools(together, max(0, room), page_size, max_tokens).tokens
