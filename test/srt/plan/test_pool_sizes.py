"""Pools of tokens and windows fill the memory that they get, and windows never have more tokens than can be used."""

from __future__ import annotations

from dataclasses import MISSING, fields
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sglang.srt.plan.cache_spec import PER_REQUEST, CacheSpec, CacheTensor, Window, key_value_cache
from sglang.srt.plan.caches import CacheGroup, group_caches
from sglang.srt.plan.memory import MemoryPlan
from sglang.srt.plan.pool_sizes import (
    CacheCost,
    Pools,
    PoolSizes,
    cache_cost,
    plan_pools,
    sized_cost,
    window_tokens,
)
from sglang.srt.plan.ranks import ONE_RANK
from sglang.srt.plan.sizes import Sizes


def kv(heads: int, window: int = 0) -> CacheSpec:
    return key_value_cache("kv", heads, 8, 8, "bfloat16", *([Window(window)] if window else []))


@given(
    window=st.integers(1, 70),
    page=st.sampled_from([1, 4, 16]),
    start=st.integers(0, 40),
    chunk=st.integers(1, 60),
    then=st.integers(0, 60),
)
def test_a_request_has_no_more_of_a_window(window: int, page: int, start: int, chunk: int, then: int) -> None:
    """A cached prefix, one chunk of a prompt, and then token after token: pages that are counted by hand."""

    def pages(length: int, upto: int) -> int:
        first = max(0, length // page * page - (window - 1)) // page
        return -(-upto // page) - first

    length = start // page * page
    assert pages(length, length + chunk) * page <= window_tokens(window, page, chunk)
    for decoded in range(length + chunk, length + chunk + then):
        assert pages(decoded, decoded + 1) * page <= window_tokens(window, page)


def by_hand(groups: tuple[CacheGroup, ...], pools: Pools, page: int) -> int:
    """Bytes of what is allocated."""
    sizes = {size.window: size.tokens + page for size in pools.windows}
    total = 0
    for group in groups:
        entries = sizes[group.lifetime.tokens] if isinstance(group.lifetime, Window) else pools.tokens
        total += int(entries * group.entries_per_token) * group.bytes_per_entry
    return total


@given(
    memory=st.integers(1 << 16, 1 << 28),
    windows=st.lists(st.sampled_from([16, 128, 1024]), max_size=2, unique=True),
    page=st.sampled_from([1, 16]),
    running=st.integers(1, 64),
    step=st.sampled_from([64, 512]),
)
def test_pools_fill_the_memory(memory: int, windows: list[int], page: int, running: int, step: int) -> None:
    groups = group_caches([(kv(2),), *((kv(3, window),) for window in windows)])
    cost = sized_cost(groups, page, running, 4096, step)
    pools = plan_pools(cost, memory, page, max_tokens=1 << 40)
    used = by_hand(groups, pools, page)
    of_token = sum(group.bytes_per_entry for group in groups)
    assert pools.token_bytes + pools.window_bytes <= memory
    assert memory - (len(groups) + page) * of_token <= used + (1 + page) * of_token, "what is left holds no page"
    for size in pools.windows:
        assert size.tokens <= pools.tokens, "a window beyond all tokens"
        assert size.tokens <= running * window_tokens(size.window, page) + step + 2 * page
        needed = window_tokens(size.window, page, min(step, 4096))
        assert size.tokens >= min(needed, pools.tokens - page), "no request could run"


def test_windows_take_at_most_half_where_one_request_can_run() -> None:
    groups = group_caches([(kv(1),), (kv(1, 1024),)])
    cost = sized_cost(groups, 1, 1000, 100_000, 512)
    pools = plan_pools(cost, 64 * 100_000, 1, max_tokens=1 << 40)
    assert pools.window_bytes == pytest.approx(32 * 100_000, rel=0.01)
    alone = sized_cost(group_caches([(kv(1),), (kv(1),)]), 1, 1000, 100_000, 512)
    assert pools.tokens == pytest.approx(plan_pools(alone, 64 * 100_000, 1, 1 << 40).tokens, rel=0.01)


def test_a_model_of_windows_only_is_limited_by_what_runs() -> None:
    groups = group_caches([(kv(1, 128),)])
    cost = sized_cost(groups, 16, 8, 4096, 512)
    pools = plan_pools(cost, 1 << 30, 16, max_tokens=8 * 4096)
    assert pools.tokens == 8 * 4096 + 16 and pools.token_bytes == 0
    assert [size.tokens for size in pools.windows] == [8 * window_tokens(128, 16) + 512]


def test_states_are_counted_apart() -> None:
    state = CacheSpec("state", (CacheTensor("state", (4, 8, 8), "float32"),), lifetime=PER_REQUEST)
    groups = group_caches([(state,), (kv(2),)])
    assert cache_cost(groups) == CacheCost(Fraction(2 * 16 * 2), 0, 4 * 8 * 8 * 4)


def test_windows_and_states_of_a_request_add_up() -> None:
    assert CacheCost(Fraction(1), window_bytes=6, state_bytes=3).bytes_per_request == 9


@given(st.integers(1, 100), st.integers(0, 100))
def test_the_padding_slot_and_checkpoints_have_states_too(requests: int, checkpoints: int) -> None:
    sizes = PoolSizes(0, 1, requests, context_len=1, has_states=True, checkpoints=checkpoints)
    assert sizes.state_rows == requests + checkpoints + 1


@example(memory=7 * 20 + 3, most=4, page=16)
@given(memory=st.integers(1, 1 << 20), most=st.integers(1, 4096), page=st.sampled_from([1, 16]))
def test_pools_end_at_the_most_tokens_and_the_page_of_padding(memory: int, most: int, page: int) -> None:
    cost = CacheCost(Fraction(7))
    pools = plan_pools(cost, memory, page, most)
    assert pools.tokens == min(memory // 7, most + page) // page * page
    assert pools.token_bytes == (memory if memory // 7 <= most + page else 7 * (most + page))


@pytest.mark.parametrize(
    ("graphs", "prompts", "uncertain_slots", "rows"), [((1, 8), (), 3, 24), ((2,), (64,), 3, 64), ((), (), 1, 4)]
)
def test_rows_of_shared_tokens(
    graphs: tuple[int, ...], prompts: tuple[int, ...], uncertain_slots: int, rows: int
) -> None:
    sizes = Sizes(4, 64, 64, graphs, 1, ONE_RANK, prompts, uncertain_slots=uncertain_slots)
    assert sizes.token_rows == rows


def test_what_is_not_asked_for_takes_nothing() -> None:
    assert Sizes(4, 64, 64, (), 1, ONE_RANK).token_rows == 4, "a token a request"
    assert {field.default for field in fields(MemoryPlan)} <= {MISSING, 0}
