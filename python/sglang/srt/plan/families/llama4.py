"""Llama 4, whose encoder `plan.towers.llama4` describes. Some layers see chunks of the tokens and rotate heads; others
see all tokens, do not rotate, and have attention temperature scaling. One routed expert a token, whose input is
multiplied by its weight, and a shared expert."""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.plan.families.family import Family
from sglang.srt.plan.feed_forward import Router
from sglang.srt.plan.weight_names import ATTENTION_NAMES, MODEL_NAMES, WeightMap

LLAMA4_TEXT = Family(
    title="Llama 4",
    model_types=("llama4",),
    architectures=("Llama4ForCausalLM",),
    names=WeightMap(
        MODEL_NAMES,
        {
            **ATTENTION_NAMES,
            "mlp.gate_up": "feed_forward.{part}_proj",
            "mlp.down": "feed_forward.down_proj",
            "moe.router": "feed_forward.router",
            "moe.experts": "feed_forward.experts",
            "moe.w13": "feed_forward.experts.{expert}.{part}_proj",
            "moe.w2": "feed_forward.experts.{expert}.{part}_proj",
            "moe.shared.gate_up": "feed_forward.shared_expert.{part}_proj",
            "moe.shared.down": "feed_forward.shared_expert.down_proj",
        },
    ),
    allowed={"hidden_act": ("silu",)},
    spellings={"moe_layers": "moe_layers_enum"},
    published={
        0: {
            "attention_chunk_size": 8192,
            "no_rope_layer_interval": 4,
            "attn_temperature_tuning": True,
            "attn_scale": 0.1,
            "floor_scale": 8192,
            "num_shared_experts": 1,
        }
    },
    head_dim=128,
    num_kv_heads=8,
    qk_norm="unit",
    optional_qk_norm=True,
    is_neox_style=False,
    chunks=True,
    has_experts=True,
    expert_form="columns",
    router=Router(0, "sigmoid", renormalize=False, scales_inputs=True),
)
LLAMA4 = replace(
    LLAMA4_TEXT,
    architectures=("Llama4ForConditionalGeneration",),
    names=replace(
        LLAMA4_TEXT.names.below("language_model.model."),
        beginnings=(("language_model.lm_head.", "lm_head."),),
        unread=("vision_model.", "multi_modal_projector."),
    ),
)
"""The language model of published checkpoints, which have an image encoder."""
