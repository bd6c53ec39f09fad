"""Families that planning knows and nobody serves yet."""

from __future__ import annotations

from sglang.srt.configs.activation import Activation
from sglang.srt.plan.families.family import Family
from sglang.srt.plan.feed_forward import Router

CORRECTION = "e_score_correction_bias"
SIGMOID = Router(0, "sigmoid", correction=CORRECTION)
SQRT_SOFTPLUS = Router(0, "sqrtsoftplus", correction=CORRECTION)

PLANNED = (
    Family(model_types=("mistral",)),
    Family(model_types=("mixtral",)),
    Family(model_types=("qwen3_vl", "qwen3_vl_moe"), qk_norm="head"),
    Family(model_types=("glm4_moe",), qk_norm="head", o_bias=False, router=SIGMOID),
    Family(model_types=("glm_moe_dsa", "deepseek_v32"), router=SIGMOID),
    # The second is what V4's FP8 exports call it.
    Family(model_types=("deepseek_v4", "deepseek_ref"), router=SQRT_SOFTPLUS, sinks=True),
    Family(
        model_types=("gpt_oss",),
        sinks=True,
        router=Router(0, bias=True),
        activation=Activation(alpha=1.702, up_offset=1.0),
        expert_bias=True,
    ),
    Family(model_types=("minimax_m2",), qk_norm="whole", router=SIGMOID),
)
