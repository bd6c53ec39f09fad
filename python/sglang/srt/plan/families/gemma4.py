"""Gemma 4, text: heads of two sizes, keys that are also values, a dense MLP beside the experts; in the small models
caches that layers share and embeddings that are added in every layer."""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.configs.activation import GELU
from sglang.srt.plan.families.family import Family
from sglang.srt.plan.families.gemma3 import NORMS_AROUND
from sglang.srt.plan.feed_forward import Router
from sglang.srt.plan.layer_spec import Sum
from sglang.srt.plan.weight_names import ATTENTION_NAMES, MLP_NAMES, MODEL_NAMES, QK_NORM_NAMES, WeightMap

_EXPERTS = {
    "moe.router": "router.proj",
    "moe.router_scales": "router",
    "moe.dense_norm": "pre_feedforward_layernorm",
    "moe.dense_norm_after": "post_feedforward_layernorm_1",
    "moe.experts_norm": "pre_feedforward_layernorm_2",
    "moe.experts_norm_after": "post_feedforward_layernorm_2",
    "moe.shared.gate_up": "mlp.{part}_proj",
    "moe.shared.down": "mlp.down_proj",
    "moe.experts": "experts",
    "moe.w13": "experts.{expert}.{part}_proj",
    "moe.w2": "experts.{expert}.{part}_proj",
}
_INPUTS = {
    "inputs.gate": "per_layer_input_gate",
    "inputs.projection": "per_layer_projection",
    "inputs_after": "post_per_layer_input_norm",
}
_MODEL_INPUTS = {
    "per_layer.table": "model.embed_tokens_per_layer",
    "per_layer.projection": "model.per_layer_model_projection",
    "per_layer.norm": "model.per_layer_projection_norm",
}
_LAYER = {**ATTENTION_NAMES, **QK_NORM_NAMES, **MLP_NAMES, **NORMS_AROUND, **_EXPERTS, **_INPUTS, "end": ""}

GEMMA4 = Family(
    title="Gemma 4",
    model_types=("gemma4",),
    architectures=("Gemma4ForCausalLM",),
    names=WeightMap({**MODEL_NAMES, **_MODEL_INPUTS}, _LAYER),
    # "vision" makes image tokens see each other in both directions; text stays causal.
    allowed={"use_bidirectional_attention": ("vision",), "hidden_activation": ("gelu_pytorch_tanh",)},
    computed=("final_logit_softcapping",),
    tie_embeddings=True,
    scaled_embeddings=True,
    residual=Sum(norms_after=True, layer_scale=True),
    head_dim=256,
    attention_scale=1.0,
    qk_norm="head",
    value_norm=True,
    window_pattern=6,
    router=Router(0, exact_logits=True),
    activation=GELU,
    expert_form="stacked",
    expert_branches=True,
)
GEMMA4_TEXT = replace(
    GEMMA4,
    model_types=(),
    architectures=("Gemma4ForConditionalGeneration",),
    names=replace(
        GEMMA4.names.below("model.language_model."),
        unread=("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio."),
    ),
)
"""The text half of a checkpoint with encoders of images and sound."""
