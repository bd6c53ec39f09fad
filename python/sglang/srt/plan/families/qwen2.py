"""Qwen 2, 2.5 and 2.5-VL, dense and MoE: q, k and v have biases, the shared expert has a gate."""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.plan.families.family import Family
from sglang.srt.plan.families.mtp import MIMO_MTP
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
    title="Qwen2 and Qwen2.5",
    model_types=("qwen2",),
    architectures=("Qwen2ForCausalLM",),
    names=WeightMap(MODEL_NAMES, _LAYER),
    qkv_bias=True,
    o_bias=False,
)
MIMO = replace(
    QWEN2,
    title="MiMo-7B",
    model_types=("mimo",),
    architectures=("MiMoForCausalLM",),
    names=replace(QWEN2.names, unread=("model.mtp_layers.",)),
    allowed={"use_mrope": (False,)},
    mtp=MIMO_MTP,
)
"""MiMo-7B: Qwen 2 with a layer for multi-token prediction."""
QWEN2_MOE = Family(
    title="Qwen2 and Qwen2.5",
    model_types=("qwen2_moe",),
    architectures=("Qwen2MoeForCausalLM",),
    names=WeightMap(MODEL_NAMES, {**_LAYER, **EXPERT_NAMES, **GATED_SHARED_NAMES}),
    allowed={"qkv_bias": (True,)},
    qkv_bias=True,
    o_bias=False,
    has_experts=True,
    router=Router(0, renormalize=False),  # norm_topk_prob says otherwise in those that do
)
_NEWER = "model.language_model."
QWEN2_5_VL = replace(
    QWEN2,
    title="Qwen2.5-VL",
    model_types=("qwen2_5_vl",),
    architectures=("Qwen2_5_VLForConditionalGeneration",),
    names=replace(
        QWEN2.names.below(_NEWER),
        unread=("model.visual.",),
        # Published checkpoints have the names on the left; newer transformers write those on the right.
        beginnings=(
            ("visual.", "model.visual."),
            *((f"model.{name}.", f"{_NEWER}{name}.") for name in ("layers", "embed_tokens", "norm")),
        ),
    ),
)
