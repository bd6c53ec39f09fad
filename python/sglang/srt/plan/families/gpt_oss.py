"""GPT-OSS: attention sinks, windows in every other layer, biases everywhere, a clamped gate, experts as one tensor."""

from __future__ import annotations

from sglang.srt.configs.activation import GPT_OSS_SWIGLU
from sglang.srt.plan.families.family import Family
from sglang.srt.plan.feed_forward import Router
from sglang.srt.plan.weight_names import ATTENTION_NAMES, MODEL_NAMES, WeightMap

GPT_OSS = Family(
    title="GPT-OSS",
    model_types=("gpt_oss",),
    architectures=("GptOssForCausalLM",),
    names=WeightMap(MODEL_NAMES, {**ATTENTION_NAMES, "moe.router": "mlp.router", "moe.experts": "mlp.experts"}),
    allowed={"hidden_act": ("silu",)},
    head_dim=64,
    window_pattern=2,
    sinks=True,
    has_experts=True,
    router=Router(0, bias=True),
    activation=GPT_OSS_SWIGLU,
    expert_bias=True,
    expert_form="gpt_oss",
)
