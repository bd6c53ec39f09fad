"""Gemma 3, text: norms before and after every block, whose weights are stored minus 1; five layers with a window, then
one without."""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.configs.activation import GELU
from sglang.srt.plan.families.family import Family
from sglang.srt.plan.layer_spec import Sum
from sglang.srt.plan.weight_names import ATTENTION_NAMES, MLP_NAMES, MODEL_NAMES, QK_NORM_NAMES, WeightMap

NORMS_AROUND = {
    "input_norm_after": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_norm_after": "post_feedforward_layernorm",
}

GEMMA3 = Family(
    title="Gemma 3",
    model_types=("gemma3",),
    architectures=("Gemma3ForCausalLM",),
    names=WeightMap(MODEL_NAMES, {**ATTENTION_NAMES, **QK_NORM_NAMES, **MLP_NAMES, **NORMS_AROUND}),
    allowed={"use_bidirectional_attention": (False,), "hidden_activation": ("gelu_pytorch_tanh",)},
    computed=("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"),
    tie_embeddings=True,
    zero_centred_norms=True,
    scaled_embeddings=True,
    residual=Sum(norms_after=True, fp32_norms=True),
    head_dim=256,
    qk_norm="head",
    window_pattern=6,
    activation=GELU,
)
GEMMA3_TEXT = replace(
    GEMMA3,
    model_types=(),
    architectures=("Gemma3ForConditionalGeneration",),
    names=replace(
        GEMMA3.names.below("language_model.model."),
        unread=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    ),
)
"""The text half of a checkpoint with an image encoder."""
