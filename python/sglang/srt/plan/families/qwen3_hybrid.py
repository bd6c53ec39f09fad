"""Qwen3-Next and Qwen3.5 / 3.6: three of four layers are gated delta nets, every fourth is attention with a gate."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from sglang.srt.blocks.moe.spec import Router
from sglang.srt.plan.attention_parts import ElementGate, PerHead
from sglang.srt.plan.families.attention import (
    RECURRENT,
    full_and_windowed,
    grouped_attention,
    kinds_by_pattern,
    mixers_by_kind,
)
from sglang.srt.plan.families.blocks import experts, ffn_by_layer, gated_shared_expert, mlp, sparse_layers
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.family import Family, Model, StoredNorms, layers_of
from sglang.srt.plan.families.mtp import QWEN_MTP
from sglang.srt.plan.families.recurrent import gated_delta
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
_NAMES = WeightMap(MODEL_NAMES, {**_LAYER, "moe.experts": "mlp.experts"}, unread=("mtp.",))


def qwen3_hybrid(c: Config, *, moe: bool, kv_heads: int, by_key_head: bool = False, expert_form: str = "") -> Model:
    """Reads a model with experts (`moe`) or without.

    kv_heads: where the config states none
    by_key_head: as GatedDelta.by_key_head
    expert_form: as MoE.form
    """
    # The gated delta nets' activations, which these keys name too, are computed as SiLU.
    c.only("hidden_act", "silu", "swish")
    c.only("output_gate_type", "silu", "swish")
    attention = partial(
        grouped_attention,
        head_dim=256,
        kv_heads=kv_heads,
        qk_norm=PerHead(fp32=True),
        gate=ElementGate() if c.default("attn_output_gate", bool, True) else None,
        hybrid_kind="hybrid_gdn",
    )
    kinds = kinds_by_pattern(c, "full_attention_interval", 4, RECURRENT)
    delta = partial(gated_delta, by_key_head=by_key_head)
    mixers = mixers_by_kind(c, kinds, {**full_and_windowed(attention), RECURRENT: delta})
    blocks = ffn_by_layer(
        sparse_layers(c) if moe else [False] * c.num_layers,
        lambda: mlp(c),
        lambda: experts(c, Router(0), shared=gated_shared_expert(c), form=expert_form),
    )
    return Model(c, layers_of(mixers, blocks), norms=StoredNorms(zero_centred=True))


def qwen3_next(c: Config) -> Model:
    c.only("use_sliding_window", False)
    return qwen3_hybrid(c, moe=True, kv_heads=2, by_key_head=True)


QWEN3_NEXT = Family(
    title="Qwen3-Next",
    model_types=("qwen3_next",),
    architectures=("Qwen3NextForCausalLM",),
    read=qwen3_next,
    names=_NAMES,
    mtp=QWEN_MTP,
)
_QWEN3_5 = replace(
    QWEN3_NEXT,
    title="Qwen3.5 and Qwen3.6",
)
QWEN3_5 = replace(
    _QWEN3_5,
    model_types=("qwen3_5",),
    architectures=("Qwen3_5ForCausalLM",),
    read=partial(qwen3_hybrid, moe=False, kv_heads=4),
)
QWEN3_5_MOE = replace(
    _QWEN3_5,
    model_types=("qwen3_5_moe",),
    architectures=("Qwen3_5MoeForCausalLM",),
    read=partial(qwen3_hybrid, moe=True, kv_heads=2),
)


def _text_half(family: Family, architecture: str) -> Family:
    """Returns the family of the language model in a checkpoint that also has an image encoder, which is not loaded."""
    names = replace(_NAMES.below("model.language_model."), unread=("mtp.", "model.visual."))
    return replace(family, model_types=(), architectures=(architecture,), names=names)


QWEN3_5_TEXT = _text_half(QWEN3_5, "Qwen3_5ForConditionalGeneration")
_STACKED = partial(qwen3_hybrid, moe=True, kv_heads=2, expert_form="stacked")
QWEN3_5_MOE_TEXT = _text_half(replace(QWEN3_5_MOE, read=_STACKED), "Qwen3_5MoeForConditionalGeneration")
