"""When prompts wait for steps without any."""

from __future__ import annotations

import pytest

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.plan.decode_interval import MANY_REQUESTS, NEVER, IntervalRule, interval_rule
from sglang.srt.plan.model_planner import describe_served_model
from sglang.srt.server_args import ServerArgs
from srt.models.harness import save_tiny


@pytest.mark.parametrize(
    ("name", "flags", "rule"),
    [
        ("qwen3", {}, MANY_REQUESTS),
        ("qwen3_moe", {}, NEVER),
        ("qwen3_moe", {"prefill_decode_interval": 4}, IntervalRule(4, 1)),
        ("qwen3", {"prefill_decode_interval": 0}, NEVER),
        ("qwen3", {"prefill_decode_interval": 2, "prefill_decode_interval_min_bs": 8}, IntervalRule(2, 8)),
    ],
)
def test_rule(name: str, flags: dict, rule: IntervalRule, tmp_path) -> None:
    save_tiny(name, tmp_path)
    args = ServerArgs.from_kwargs(model_path=str(tmp_path), device="cpu", skip_tokenizer_init=True, **flags)
    assert interval_rule(args, describe_served_model(args, ModelConfig.from_server_args(args))) == rule
