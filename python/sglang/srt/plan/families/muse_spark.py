"""Muse-Spark: Muse-Glimmer's attention, whose output is normed before its gate, experts over a projection of the hidden
states, each followed by a norm, and a residual sum that is weighted channel by channel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from sglang.srt.blocks.gated_sum.spec import GatedSum
from sglang.srt.blocks.moe.spec import ExpertNorms, MoE, Router
from sglang.srt.plan.attention_parts import ElementGate
from sglang.srt.plan.families.attention import FULL, WINDOWED, full_and_windowed, mixers_by_kind
from sglang.srt.plan.families.blocks import experts, ffn_by_layer, mlp, sparse_layers
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.family import Family, Model, layers_of
from sglang.srt.plan.families.muse_glimmer import (
    MUSE_EMBEDDING,
    MUSE_GLIMMER,
    MUSE_NORMS,
    muse_attention,
    muse_logits,
)
from sglang.srt.plan.weight_names import EXPERT_NAMES

_USUAL = {
    "head_dim": 64,
    "sliding_window": 2048,
    "final_logit_softcapping": 20.0,
    "qk_scale_factor": 5.4730064863875,
    "output_multiplier": 0.1767766952966369,
    "post_norm_eps": 1e-8,
    "residual_gate_temperature": 0.3,
    "moe_hidden_size": 4096,
    "moe_intermediate_size": 4096,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
"""Values that a config may leave out."""
_ONLY: Mapping[str, object] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "mlp_bias": False,
    "n_group": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "swiglu_limit": 0,
    "tie_word_embeddings": False,
    "topk_group": 1,
}


def muse_spark(c: Config) -> Model:
    for key, value in _ONLY.items():
        c.only(key, value)
    c = c.usual(_USUAL)
    if c.values.get("layer_types") is None:  # counted from the last layer
        kinds = [FULL if (c.num_layers - 1 - i) % 4 == 0 else WINDOWED for i in range(c.num_layers)]
        c = c.usual({"layer_types": kinds})
    gate = ElementGate(own_projection=True, normed=True)
    mixers = mixers_by_kind(c, c.values["layer_types"], full_and_windowed(partial(muse_attention, gate=gate)))
    blocks = ffn_by_layer(sparse_layers(c), lambda: mlp(c), lambda: _experts(c))
    residual = GatedSum(_positive(c, "residual_gate_temperature"), _positive(c, "post_norm_eps"))
    return Model(c, layers_of(mixers, blocks, residual), MUSE_NORMS, MUSE_EMBEDDING, muse_logits(c))


def _experts(c: Config) -> MoE:
    """The weights of a token's experts are divided by their sum and 1e-15, which is less than fp32 tells apart from a
    sum above 1e-8.

    The two projections around the experts, of 64 MiB each in 16 bits, are divided among ranks: whole, they would be
    7.75 GiB of every rank, which a token reads in 4.6 ms (predicted for an RTX PRO 6000)."""
    router = Router(
        0,
        "sigmoid",
        correction="e_score_correction_bias",
        float32=True,
        logit_scale=c.default("output_multiplier", float, 1.0),
    )
    norms = ExpertNorms(c.default("rms_norm_eps", float, 1e-5), _positive(c, "post_norm_eps"))
    size = c.positive("moe_hidden_size")
    return experts(c, router, form="stacked", latent_size=size, latent_norms=norms, cuts_latents=True)


def _positive(c: Config, key: str) -> float:
    value = c.default(key, float, 0.0)
    if not value > 0:
        c.problem(f"{key} = {value!r} is not supported: it must be above 0.")
    return value


MUSE_SPARK = Family(
    title="Muse-Spark",
    model_types=("muse_spark",),
    architectures=("MuseSparkForConditionalGeneration",),
    read=muse_spark,
    names=replace(
        MUSE_GLIMMER.names,
        layer={
            **MUSE_GLIMMER.names.layer,
            **EXPERT_NAMES,
            "moe.experts": "mlp.experts",
            "moe.latent_in": "mlp.pre_expert_proj",
            "moe.latent_norm": "mlp.pre_expert_norm",
            "moe.output_norm": "mlp.experts.post_expert_norm",
            "moe.latent_out": "mlp.post_expert_proj",
            "input_norm_gate": "post_attention_residual_gate",
            "mlp_norm_gate": "post_feedforward_residual_gate",
        },
        unread=(*MUSE_GLIMMER.names.unread, "model.audio_tower."),
    ),
)
