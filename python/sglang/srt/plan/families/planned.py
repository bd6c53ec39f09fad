"""Families that planning knows and nobody serves yet."""

from __future__ import annotations

from sglang.srt.plan.families.family import Family
from sglang.srt.plan.feed_forward import Router

CORRECTION = "e_score_correction_bias"
SIGMOID = Router(0, "sigmoid", correction=CORRECTION)
SQRT_SOFTPLUS = Router(0, "sqrtsoftplus", correction=CORRECTION)

PLANNED = (
    Family(model_types=("qwen3_vl", "qwen3_vl_moe"), qk_norm="head"),
    Family(model_types=("glm_moe_dsa", "deepseek_v32"), router=SIGMOID),
    # The second is what V4's FP8 exports call it.
    Family(model_types=("deepseek_v4", "deepseek_ref"), router=SQRT_SOFTPLUS, sinks=True),
)
