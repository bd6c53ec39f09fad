"""Qwen3 and Qwen3-VL, dense and MoE: norms on the q and k heads, whose size is independent of the hidden size."""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.plan.families.family import Family
from sglang.srt.plan.families.mtp import QWEN_MTP
from sglang.srt.plan.feed_forward import Router
from sglang.srt.plan.weight_names import (
    ATTENTION_NAMES,
    EXPERT_NAMES,
    MLP_NAMES,
    MODEL_NAMES,
    QK_NORM_NAMES,
    WeightMap,
)

_LAYER = {**ATTENTION_NAMES, **QK_NORM_NAMES, **MLP_NAMES}

QWEN3 = Family(
    title="Qwen3",
    model_types=("qwen3",),
    architectures=("Qwen3ForCausalLM",),
    names=WeightMap(MODEL_NAMES, _LAYER),
    qk_norm="head",
    head_dim=128,
    num_kv_heads=32,
)
QWEN3_MOE = Family(
    title="Qwen3",
    model_types=("qwen3_moe",),
    architectures=("Qwen3MoeForCausalLM",),
    names=WeightMap(MODEL_NAMES, {**_LAYER, **EXPERT_NAMES}, unread=("mtp.",)),
    qk_norm="head",
    num_kv_heads=4,
    has_experts=True,
    router=Router(0, renormalize=False),  # norm_topk_prob says otherwise in those that do
    mtp=QWEN_MTP,  # the embedded model has one; Qwen publishes none before Qwen3-Next
)
QWEN3_VL = replace(
    QWEN3,
    title="Qwen3-VL",
    model_types=("qwen3_vl",),
    architectures=("Qwen3VLForConditionalGeneration",),
    names=replace(QWEN3.names.below("model.language_model."), unread=("model.visual.",)),
)
QWEN3_VL_MOE = replace(
    QWEN3_MOE,
    title="Qwen3-VL",
    model_types=("qwen3_vl_moe",),
    architectures=("Qwen3VLMoeForConditionalGeneration",),
    names=replace(
        WeightMap(MODEL_NAMES, {**_LAYER, **EXPERT_NAMES, "moe.experts": "mlp.experts"}).below("model.language_model."),
        unread=("model.visual.",),
    ),
    expert_form="stacked_columns",
    router=Router(0),
    mtp=None,
)
