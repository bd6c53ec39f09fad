"""A planner with changed flags plans what a new one with these flags does."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.hardware.arch import arch_by_name
from sglang.srt.plan.model_planner import ModelPlanner
from sglang.srt.server_args import ServerArgs
from srt.kernels.published import any_checkpoint


def planner_of(args: ServerArgs) -> ModelPlanner:
    arch = arch_by_name("rtx-pro-6000-server")
    model = ModelConfig.from_server_args(args)
    return ModelPlanner(args, model, arch, 90 << 30, frozenset({"triton"}), served=False, advises=False)


@pytest.mark.parametrize(
    "change", [{"tp_size": 8}, {"pp_size": 2}, {"tp_size": 4, "mm_enable_dp_encoder": True}], ids=str
)
def test_the_encoder_is_shared_as_the_flags_say(change: dict[str, object], tmp_path: Path) -> None:
    args = ServerArgs.from_kwargs(model_path=str(any_checkpoint("Qwen3-VL-30B-A3B-Instruct", tmp_path)))
    planner = planner_of(args)
    planner.weights()
    changed = planner.changed(**change)
    assert changed.weights() == planner_of(changed.args).weights()
