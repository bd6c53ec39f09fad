"""Gemma 3, text: norms before and after every block, whose weights are stored minus 1; five layers with a window, then
one without."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from sglang.srt.configs.activation import GELU
from sglang.srt.plan.attention_parts import PerHead, Softmax
from sglang.srt.plan.families.attention import (
    WINDOWED,
    full_and_windowed,
    grouped_attention,
    kinds_by_pattern,
    mixers_by_kind,
)
from sglang.srt.plan.families.blocks import activation, mlp
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.family import Embedding, Family, Logits, Model, StoredNorms, layers_of
from sglang.srt.plan.layer_spec import Sum
from sglang.srt.plan.weight_names import ATTENTION_NAMES, MLP_NAMES, MODEL_NAMES, QK_NORM_NAMES, WeightMap

NORMS_AROUND = {
    "input_norm_after": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_norm_after": "post_feedforward_layernorm",
}


def gemma3(c: Config) -> Model:
    c = c.usual({"tie_word_embeddings": True})
    c.only("use_bidirectional_attention", False)
    c.only("hidden_activation", "gelu_pytorch_tanh")
    scalar = c.default("query_pre_attn_scalar", float, 0.0)
    attention = partial(
        grouped_attention,
        head_dim=256,
        qk_norm=PerHead(fp32=True),
        softmax=Softmax(scalar**-0.5 if scalar else 0.0, c.default("attn_logit_softcapping", float, 0.0)),
    )
    kinds = kinds_by_pattern(c, "sliding_window_pattern", 6, WINDOWED)
    mixers = mixers_by_kind(c, kinds, full_and_windowed(attention))
    blocks = [mlp(c, activation(c, GELU))] * c.num_layers
    return Model(
        c,
        layers_of(mixers, blocks, Sum(norms_after=True, fp32_norms=True)),
        norms=StoredNorms(zero_centred=True),
        embedding=Embedding(c.positive("hidden_size") ** 0.5),
        logits=Logits(cap=c.default("final_logit_softcapping", float, 0.0)),
    )


GEMMA3 = Family(
    title="Gemma 3",
    model_types=("gemma3",),
    architectures=("Gemma3ForCausalLM",),
    read=gemma3,
    names=WeightMap(MODEL_NAMES, {**ATTENTION_NAMES, **QK_NORM_NAMES, **MLP_NAMES, **NORMS_AROUND}),
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
