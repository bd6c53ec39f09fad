"""Qwen 2 and 2.5, dense and mixture of experts: q, k and v have biases, the shared expert a gate."""

from __future__ import annotations

from sglang.srt.plan.families.family import Family
from sglang.srt.plan.feed_forward import Router
from sglang.srt.plan.weight_names import (
    ATTENTION_NAMES,
    EXPERT_NAMES,
    GATED_SHARED_NAMES,
    MLP_NAMES,
    MODEL_NAMES,
    WeightMap,
)

_LAYER = {**ATTENTION_NAMES, **MLP_NAMES}

QWEN2 = Family(
    model_types=("qwen2",),
    architectures=("Qwen2ForCausalLM",),
    names=WeightMap(MODEL_NAMES, _LAYER),
    qkv_bias=True,
    o_bias=False,
)
QWEN2_MOE = Family(
    model_types=("qwen2_moe",),
    architectures=("Qwen2MoeForCausalLM",),
    names=WeightMap(MODEL_NAMES, {**_LAYER, **EXPERT_NAMES, **GATED_SHARED_NAMES}),
    allowed={"qkv_bias": (True,)},
    qkv_bias=True,
    o_bias=False,
    has_experts=True,
    router=Router(0, renormalize=False),  # norm_topk_prob says otherwise in those that do
)
