"""How many recurrent states are planned, and what the flags say of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.plan.plan import Plan, make_plan
from sglang.srt.plan.state_rows import StateRows, state_rows
from sglang.srt.server_args import ServerArgs

CONFIGS = Path(__file__).parents[1] / "kernels" / "configs"
GIB = 1024**3


def rows(most: int, available: int, weights: int, state: int, **flags: Any) -> StateRows:
    return state_rows(ServerArgs(model_path="", **flags), most, available, weights, state)


def test_states_and_checkpoints_leave_half_of_the_memory_to_tokens() -> None:
    assert rows(1024, 90, 30, 0) == StateRows(1024, 0)
    assert rows(1024, 9000, 1000, 10) == StateRows(200, 200)
    assert rows(1024, 90, 30, 30) == StateRows(8, 0), "a server runs that many, if only without prefixes"
    assert rows(1024, 9000, 1000, 10, max_running_requests=300) == StateRows(300, 100)
    assert rows(1024, 9000, 1000, 10, disable_radix_cache=True).checkpoints == 0


def test_a_number_of_states() -> None:
    assert rows(1024, 9000, 1000, 10, max_mamba_cache_size=60) == StateRows(30, 30)
    assert rows(20, 9000, 1000, 10, max_mamba_cache_size=60) == StateRows(20, 40)
    assert rows(1024, 9000, 1000, 10, max_mamba_cache_size=60, max_running_requests=8) == StateRows(8, 52)
    assert rows(1024, 9000, 1000, 10, max_mamba_cache_size=60, disable_radix_cache=True) == StateRows(60, 0)
    with pytest.raises(UserError, match="-size 60 leaves room for 60 states .* --max-running-requests needs 61"):
        rows(1024, 9000, 1000, 10, max_mamba_cache_size=60, max_running_requests=61)


def test_a_share_of_the_memory() -> None:
    """Of 8,000 bytes: a third beside two thirds."""
    assert rows(1024, 9000, 1000, 10, mamba_full_memory_ratio=0.5) == StateRows(133, 133)
    assert rows(1024, 9000, 1000, 10, mamba_full_memory_ratio=0.5, max_running_requests=16) == StateRows(16, 250)
    assert rows(1024, 9000, 1000, 10, mamba_full_memory_ratio=0.5, max_mamba_cache_size=60) == StateRows(30, 30)
    with pytest.raises(UserError, match="--mamba-full-memory-ratio 0.001 leaves room for 0 states of 10 B"):
        rows(1024, 9000, 1000, 10, mamba_full_memory_ratio=0.001)


@pytest.mark.parametrize("ratio", [0.0, -1.0])
def test_impossible_ratios(ratio: float) -> None:
    with pytest.raises(UserError, match="--mamba-full-memory-ratio must be above 0"):
        ServerArgs.from_kwargs(model_path="", mamba_full_memory_ratio=ratio)


def plan(config: str, folder: Path, **flags: Any) -> Plan:
    (folder / "config.json").write_text((CONFIGS / config).read_text())
    args = ServerArgs.from_kwargs(model_path=str(folder), load_format="dummy", **flags)
    model = ModelConfig.from_server_args(args)
    return make_plan(args, model, arch_by_name("rtx-pro-6000-server"), 94 * GIB, frozenset({"triton"}))


def test_the_plan_follows_the_flags(tmp_path: Path) -> None:
    plain = plan("qwen35.json", tmp_path)
    few = plan("qwen35.json", tmp_path, max_mamba_cache_size=32)
    assert (few.max_running_requests, few.state_checkpoints) == (16, 16)
    assert few.max_total_num_tokens > plain.max_total_num_tokens
    less = plan("qwen35.json", tmp_path, mamba_full_memory_ratio=0.25)
    left = less.memory.available - less.memory.weights
    assert 0.19 < less.memory.states / left < 0.21, "one part in five of what the weights leave"
    assert few.warnings == plain.warnings == ()


def test_models_without_states_say_that_the_flags_do_nothing(tmp_path: Path) -> None:
    (warning,) = plan("qwen3.json", tmp_path, max_mamba_cache_size=32).warnings
    assert warning == "--max-mamba-cache-size 32 has no effect: the model has no recurrent states"


def test_strategies_have_no_effect_and_say_why(caplog: pytest.LogCaptureFixture) -> None:
    ServerArgs.from_cli(["--model-path", "x", "--mamba-scheduler-strategy", "extra_buffer"], "test")
    assert "--mamba-scheduler-strategy has no effect in sm120-sglang: states at the ends of chunks" in caplog.text
