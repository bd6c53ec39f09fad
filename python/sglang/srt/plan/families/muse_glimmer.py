"""Muse-Glimmer, whose encoder `towers.muse_glimmer.spec` describes: windows with rotation and full attention without,
norms of heads without weights, an output gate with its own projection, norms around every block, a normed embedding,
scaled and softly capped logits."""

from __future__ import annotations

from functools import partial

from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.configs.rope import by_layer_type
from sglang.srt.plan.attention_parts import ElementGate, Gate, Softmax, Unweighted
from sglang.srt.plan.families.attention import (
    WINDOWED,
    full_and_windowed,
    grouped_attention,
    kinds_by_pattern,
    mixers_by_kind,
)
from sglang.srt.plan.families.blocks import mlp
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.family import Embedding, EmbeddingNorm, Family, Logits, Model, StoredNorms, layers_of
from sglang.srt.plan.families.gemma3 import NORMS_AROUND
from sglang.srt.plan.layer_spec import Sum
from sglang.srt.plan.weight_names import ATTENTION_NAMES, MLP_NAMES, MODEL_NAMES, WeightMap

_NAMES = WeightMap(MODEL_NAMES, {**ATTENTION_NAMES, **MLP_NAMES, **NORMS_AROUND}).below("model.language_model.")

_USUAL = {
    "head_dim": 128,
    "sliding_window": 2048,
    "final_logit_softcapping": 20.0,
    "qk_scale_factor": 3.87,
    "output_multiplier": 0.19611613513818404,
    "post_norm_eps": 1e-8,
}
"""Values that the published config leaves out."""


def muse_glimmer(c: Config) -> Model:
    c.only("tie_word_embeddings", False)
    c.only("hidden_activation", "silu")
    c = c.usual(_USUAL)
    kinds = kinds_by_pattern(c, "sliding_window_pattern", 4, WINDOWED)
    gate = ElementGate(own_projection=True) if c.default("attn_output_gate", bool, True) else None
    mixers = mixers_by_kind(c, kinds, full_and_windowed(partial(muse_attention, gate=gate)))
    residual = Sum(norms_after=True, fp32_norms=True, eps_after=c.default("post_norm_eps", float, 0.0))
    return Model(
        c,
        layers_of(mixers, [mlp(c)] * c.num_layers, residual),
        norms=MUSE_NORMS,
        embedding=MUSE_EMBEDDING,
        logits=muse_logits(c),
    )


MUSE_NORMS, MUSE_EMBEDDING = StoredNorms(zero_centred=True, plain_final=True), Embedding(norm=EmbeddingNorm())


def muse_logits(c: Config) -> Logits:
    """Returns how logits are scaled and capped."""
    return Logits(c.default("output_multiplier", float, 1.0), c.default("final_logit_softcapping", float, 0.0))


def muse_attention(c: Config, window: int, gate: Gate | None) -> GQA:
    """Only layers with a window rotate heads, unless the config says it by layer type. q's factor cannot be in the
    norms, which have no weights."""
    rotates = window > 0 or by_layer_type(c.values)
    head_dim = c.positive("head_dim")
    return grouped_attention(
        c,
        window,
        rotates=rotates,
        softmax=Softmax(c.default("qk_scale_factor", float, 0.0) * head_dim**-0.5),
        qk_norm=Unweighted(),
        gate=gate,
    )


MUSE_GLIMMER = Family(
    title="Muse-Glimmer",
    model_types=("muse_glimmer",),
    architectures=("MuseGlimmerForConditionalGeneration",),
    read=muse_glimmer,
    names=WeightMap(
        _NAMES.model,
        _NAMES.layer,
        _NAMES.layer_prefix,
        decoder=_NAMES.decoder,
        unread=("model.vision_tower.", "model.vision_adapter.", "model.vision_projection."),
    ),
)
