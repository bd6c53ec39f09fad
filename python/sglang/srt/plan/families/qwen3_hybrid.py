"""Qwen3-Next and Qwen3.5 / 3.6: three of four layers are gated delta nets, every fourth is attention with a gate."""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.plan.families.family import Family
from sglang.srt.plan.families.mtp import QWEN_MTP
from sglang.srt.plan.feed_forward import Router
from sglang.srt.plan.weight_names import (
    ATTENTION_NAMES,
    EXPERT_NAMES,
    GATED_SHARED_NAMES,
    MLP_NAMES,
    MODEL_NAMES,
    QK_NORM_NAMES,
    RECURRENT_NAMES,
    WeightMap,
)

_LAYER = {**ATTENTION_NAMES, **QK_NORM_NAMES, **RECURRENT_NAMES, **MLP_NAMES, **EXPERT_NAMES, **GATED_SHARED_NAMES}
# The recurrent layers' activations, which these keys name too, are computed as SiLU.
_COMPUTED = {"hidden_act": ("silu", "swish"), "output_gate_type": ("silu", "swish")}
_NAMES = WeightMap(MODEL_NAMES, {**_LAYER, "moe.experts": "mlp.experts"}, unread=("mtp.",))

QWEN3_NEXT = Family(
    title="Qwen3-Next",
    model_types=("qwen3_next",),
    architectures=("Qwen3NextForCausalLM",),
    names=_NAMES,
    allowed={**_COMPUTED, "use_sliding_window": (False,)},
    qk_norm="head",
    zero_centred_norms=True,
    output_gate=True,
    projected_by_key_head=True,
    head_dim=256,
    num_kv_heads=2,
    recurrent_pattern=4,
    hybrid_kind="hybrid_gdn",
    has_experts=True,
    router=Router(0),
    mtp=QWEN_MTP,
)
_QWEN3_5 = replace(
    QWEN3_NEXT,
    title="Qwen3.5 and Qwen3.6",
    allowed=_COMPUTED,
    projected_by_key_head=False,
    has_experts=False,
    num_kv_heads=4,
)
QWEN3_5 = replace(
    _QWEN3_5,
    model_types=("qwen3_5",),
    architectures=("Qwen3_5ForCausalLM",),
)
QWEN3_5_MOE = replace(
    _QWEN3_5,
    model_types=("qwen3_5_moe",),
    architectures=("Qwen3_5MoeForCausalLM",),
    has_experts=True,
    num_kv_heads=2,
)


def _text_half(family: Family, architecture: str) -> Family:
    """Returns the family of the language model in a checkpoint that also has an image encoder, which is not loaded."""
    names = replace(_NAMES.below("model.language_model."), unread=("mtp.", "model.visual."))
    return replace(family, model_types=(), architectures=(architecture,), names=names)


QWEN3_5_TEXT = _text_half(QWEN3_5, "Qwen3_5ForConditionalGeneration")
QWEN3_5_MOE_TEXT = _text_half(replace(QWEN3_5_MOE, expert_form="stacked"), "Qwen3_5MoeForConditionalGeneration")
