"""Chooses how many positions the rotary tables have: the whole context, or those that a request can reach.

A request's tokens lie in the pool, and padding is at position 0. So where the context is much longer than the pool,
such as Llama 4's of 10 million tokens, most of a table for all of it (5 GiB) would never be read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sglang.srt.plan.pool_sizes import CacheCost, plan_pools

MIN_POSITIONS = 1 << 18
"""Shorter contexts have all of their positions: more than warm-up steps reach, and usually at most 128 MiB."""
SPARE = 1024
"""Positions beyond the pool's tokens, for draft tokens behind a request's last token."""


def num_positions(context_len: int, step_tokens: int, pool_tokens: Callable[[], int]) -> int:
    """Returns the number of positions. `step_tokens`: most tokens of a step. `pool_tokens()`: most tokens that the pool
    can have; called only where the result depends on it."""
    if context_len <= max(MIN_POSITIONS, step_tokens) + SPARE:
        return context_len
    return min(context_len, max(MIN_POSITIONS, step_tokens, pool_tokens()) + SPARE)


def tokens_beside_rows(cost: CacheCost, room: int, row_bytes: int, page_size: int, max_tokens: int) -> int:
    """Returns the tokens of a pool, the padding page included, that shares `room` bytes with rotary tables of
    `row_bytes` for each of its tokens."""
    together = replace(cost, bytes_per_token=cost.bytes_per_token + row_bytes)
    return plan_pools(together, max(0, room), page_size, max_tokens).tokens
