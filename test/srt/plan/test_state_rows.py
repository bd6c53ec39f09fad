"""How many recurrent states are planned, and what the flags say of them."""

from __future__ import annotations

from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from sglang.srt import environ
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.plan.plan import Plan, make_plan
from sglang.srt.plan.pool_sizes import CacheCost
from sglang.srt.plan.state_rows import CONVERSATION_TOKENS, StateRows, state_rows
from sglang.srt.server_args import ServerArgs
from srt.kernels import published

GIB = 1024**3


STATE, TOKEN = 1000, 1
CONTEXT = 10_000


def rows(most: int, caches: int, each: int = 0, **flags: Any) -> StateRows:
    """States of 1,000 bytes and tokens of one; `caches` bytes of both beside row 0, and for each request that may run
    `each` less."""
    args, cost = ServerArgs(model_path="", **flags), CacheCost(Fraction(TOKEN), state_bytes=STATE)
    return state_rows(args, most, CONTEXT, cost, lambda running: caches + cost.states_bytes(1) - each * running)


def numbers(found: StateRows) -> tuple[int, int]:
    return found.running, found.checkpoints


def test_a_running_conversation_has_a_state_and_a_checkpoint() -> None:
    one = 2 * STATE + CONVERSATION_TOKENS * TOKEN
    assert numbers(rows(1024, 100 * one)) == (100, 100)
    assert numbers(rows(1024, 100 * one, disable_radix_cache=True)) == (119, 0)


def test_what_running_requests_take_elsewhere_counts() -> None:
    """Graphs, logits, tables: the more run at once, the less is left for caches."""
    one = 2 * STATE + CONVERSATION_TOKENS * TOKEN
    assert numbers(rows(1024, 100 * (one + 5000), each=5000)) == (100, 100)


def test_a_conversation_that_waits_has_a_checkpoint() -> None:
    one, waiting = 2 * STATE + CONVERSATION_TOKENS * TOKEN, STATE + CONVERSATION_TOKENS * TOKEN
    assert numbers(rows(1024, 16 * one + 70 * waiting, max_running_requests=16)) == (16, 86)
    assert numbers(rows(20, 9000 * one)) == (20, 20), "no more rows than twice the most requests"


@pytest.mark.parametrize(("left", "expected"), [(26_000, 4), (90_000, 8), (140_000, 20), (200_000, 32)])
def test_one_request_of_the_full_context_comes_before_the_ninth(left: int, expected: int) -> None:
    """Of 100,000 tokens. Conversations alone would get 4, 14, 22 and 32."""
    cost = CacheCost(Fraction(TOKEN), state_bytes=STATE)
    found = state_rows(ServerArgs(model_path=""), 1024, 100_000, cost, lambda _: left + cost.states_bytes(1))
    assert numbers(found) == (expected, expected)


def test_more_requests_than_there_is_room_for_checkpoints() -> None:
    found = rows(1024, 50 * (STATE + CONVERSATION_TOKENS), max_running_requests=50)
    assert numbers(found) == (50, 0) and found.note is not None and "leave no room for checkpoints" in found.note
    assert (
        rows(1024, 50 * (STATE + CONVERSATION_TOKENS), max_running_requests=50, disable_radix_cache=True).note is None
    )


def test_a_number_of_states() -> None:
    assert numbers(rows(1024, 8000, max_mamba_cache_size=60)) == (30, 30)
    assert numbers(rows(20, 8000, max_mamba_cache_size=60)) == (20, 40)
    assert numbers(rows(1024, 8000, max_mamba_cache_size=60, max_running_requests=8)) == (8, 52)
    assert numbers(rows(1024, 8000, max_mamba_cache_size=60, disable_radix_cache=True)) == (60, 0)
    with pytest.raises(UserError, match="-size 60 leaves room for 60 states .* --max-running-requests needs 61"):
        rows(1024, 8000, max_mamba_cache_size=60, max_running_requests=61)


def test_a_share_of_the_memory() -> None:
    """A third beside two thirds, of what is left when so many run."""
    room = 800 * STATE
    assert numbers(rows(1024, room, mamba_full_memory_ratio=0.5)) == (133, 133)
    assert numbers(rows(1024, room, each=3 * STATE, mamba_full_memory_ratio=0.5)) == (88, 90)
    assert numbers(rows(1024, room, mamba_full_memory_ratio=0.5, max_running_requests=16)) == (16, 250)
    assert numbers(rows(1024, room, mamba_full_memory_ratio=0.5, max_mamba_cache_size=60)) == (30, 30)
    with pytest.raises(UserError, match="--mamba-full-memory-ratio 0.001 leaves room for 0 states of 1,000 B"):
        rows(1024, room, mamba_full_memory_ratio=0.001)


@pytest.mark.parametrize("ratio", [0.0, -1.0])
def test_impossible_ratios(ratio: float) -> None:
    with pytest.raises(UserError, match="--mamba-full-memory-ratio must be above 0"):
        ServerArgs.from_kwargs(model_path="", mamba_full_memory_ratio=ratio)


def plan(config: str, folder: Path, **flags: Any) -> Plan:
    args = ServerArgs.from_kwargs(model_path=str(published.checkpoint(config, folder)), load_format="dummy", **flags)
    model = ModelConfig.from_server_args(args)
    return make_plan(args, model, arch_by_name("rtx-pro-6000-server"), 94 * GIB, frozenset({"triton"}))


def test_the_plan_follows_the_flags(tmp_path: Path) -> None:
    plain = plan("qwen35", tmp_path)
    few = plan("qwen35", tmp_path, max_mamba_cache_size=32)
    assert (few.max_running_requests, few.state_checkpoints) == (16, 16)
    assert few.max_total_num_tokens > plain.max_total_num_tokens
    less = plan("qwen35", tmp_path, mamba_full_memory_ratio=0.25)
    assert 0.24 < less.memory.states / less.memory.kv_cache < 0.26
    assert few.warnings == plain.warnings == ()
    assert few.states == "16 requests and 16 checkpoints of 64.4 MB, by --max-mamba-cache-size 32"
    halved = plan("qwen35", tmp_path, max_mamba_cache_size=32, mamba_ssm_dtype="bfloat16")
    assert halved.states.startswith("16 requests and 16 checkpoints of 32.9 MB")
    assert halved.max_total_num_tokens > few.max_total_num_tokens


def test_states_tokens_and_graphs_are_planned_together(tmp_path: Path) -> None:
    """Nothing is left over, and tokens are there for what states are for."""
    for flags in ({}, {"mem_fraction_static": 0.85}, {"max_running_requests": 24}, {"cuda_graph_max_bs": 16}):
        made = plan("qwen35", tmp_path, **flags)
        per_request = made.max_total_num_tokens / made.max_running_requests
        assert per_request > 0.98 * CONVERSATION_TOKENS and made.state_checkpoints >= made.max_running_requests
        memory = made.memory
        taken = sum(value for name, value in asdict(memory).items() if name != "available")
        assert memory.available * (0.84 if flags.get("mem_fraction_static") else 0.999) < taken <= memory.available
        if not flags:
            assert per_request < 1.05 * CONVERSATION_TOKENS


def test_models_without_states_say_that_the_flags_do_nothing(tmp_path: Path) -> None:
    (warning,) = plan("qwen3", tmp_path, max_mamba_cache_size=32).warnings
    assert warning == "--max-mamba-cache-size 32 has no effect: the model has no recurrent states"


def test_strategies_have_no_effect_and_say_why(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environ, "_already_warned", set())
    words = [
        "--mamba-scheduler-strategy",
        "extra_buffer",
        "--max-mamba-cache-size",
        "32",
        "--mamba-ssm-dtype",
        "bfloat16",
    ]
    args = ServerArgs.from_cli(["--model-path", "x", *words, "--mamba-full-memory-ratio", "0.5"], "test")
    assert (args.max_mamba_cache_size, args.mamba_ssm_dtype, args.mamba_full_memory_ratio) == (32, "bfloat16", 0.5)
    assert "--mamba-scheduler-strategy has no effect in sm120-sglang: states at the ends of chunks" in caplog.text


@pytest.mark.parametrize(("config", "ranks"), [("Inkling-Small-NVFP4", 2), ("deepseek_v4", 4)])
def test_windows_of_requests_that_run_leave_each_its_tokens(config: str, ranks: int, tmp_path: Path) -> None:
    """Of models with windows and states: no more requests than conversations of 4,096 tokens have room for."""
    planned = plan(config, tmp_path, tp_size=ranks, context_length=131_072)
    running = planned.max_running_requests
    assert 0.98 < planned.max_total_num_tokens / (CONVERSATION_TOKENS * running) < 1.1
    for size in planned.windows:
        assert size.tokens >= running * min(size.window - 1, CONVERSATION_TOKENS), "a window of each is there"
