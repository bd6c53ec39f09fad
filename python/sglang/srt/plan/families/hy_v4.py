"""Hy4: sparse latent attention with sinks and a gate for each element of the output, an indexer whose selection later
layers reuse, and four residual streams that do not mix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sglang.srt.blocks.hyper_connections.spec import HyperConnections
from sglang.srt.blocks.mla.spec import MLA
from sglang.srt.blocks.moe.spec import Router
from sglang.srt.errors import UserError
from sglang.srt.plan.attention_parts import ElementGate, LatentNorms
from sglang.srt.plan.families.blocks import experts, ffn_by_layer, mlp, shared_experts
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.family import Family, Model, layers_of
from sglang.srt.plan.families.latent import indexed_layers, latent_attention
from sglang.srt.plan.weight_names import (
    ATTENTION_NAMES,
    CACHE_SCALE_ALIASES,
    EXPERT_NAMES,
    LATENT_NAMES,
    MLP_NAMES,
    MODEL_NAMES,
    SHARED_NAMES,
    WeightMap,
)

_USUAL: Mapping[str, object] = {
    "hc_mult": 4,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-5,
    "rope_interleave": False,
    "routed_scaling_factor": 2.827,
    "swiglu_limit": 10.0,
}
_ONLY: Mapping[str, object] = {
    "attention_bias": False,
    "enable_ihc": True,
    "gated_mla": True,
    "gating_type": "elementwise",
    "learnable_sink": True,
    "use_dsa": True,
    "use_mla": True,
}
_TRAINING = ("bitwise_backward_align", "enable_lm_head_fp32", "learnable_sink_init", "mtp_loss_factor")
"""Keys that are not obeyed: three of training, and one for an output matrix in fp32, which is held in the model's type
here, as routers are (docs/recipes.md says so)."""


def hy_v4(c: Config) -> Model:
    c = c.usual(_USUAL)
    for key, value in _ONLY.items():
        c.only(key, value)
    c.ignore(*_TRAINING)
    with_indexer = _attention(c)
    without = replace(with_indexer, indexer=None)
    mixers = [with_indexer if has_indexer else without for has_indexer in indexed_layers(c.usual(_usual_layers(c)))]
    router = Router(0, "sigmoid", correction="e_score_correction_bias", exact_logits=True)
    unlimited = c.with_values({"swiglu_limit": 0.0})  # the limit is that of routed experts alone
    routed = c.with_values({"swiglu_limit": max(0.0, c.default("swiglu_limit", float, 0.0))})
    function = mlp(unlimited).activation
    moe = experts(routed, router, shared=shared_experts(c), form="stacked")
    if moe.shared is not None and moe.activation != function:
        moe = replace(moe, shared=replace(moe.shared, activation=function))
    sparse = [kind == "sparse" for kind in c.usual(_usual_layers(c)).by_layer("mlp_layer_types", "sparse")]
    return Model(c, layers_of(mixers, ffn_by_layer(sparse, lambda: mlp(unlimited), lambda: moe), _streams(c)))


def _usual_layers(c: Config) -> dict[str, object]:
    """Returns the kinds of layers that the class of transformers has where the config names none."""
    return {
        "indexer_types": ["full" if i == 0 or i % 4 == 1 else "shared" for i in range(c.num_layers)],
        "mlp_layer_types": ["dense" if i == 0 else "sparse" for i in range(c.num_layers)],
    }


def _attention(c: Config) -> MLA:
    if not c.count("index_topk"):
        raise UserError(f"{c.source}: 'index_topk' is missing.")
    latent = latent_attention(c)
    eps = c.default("rms_norm_eps", float, 1e-5)
    assert latent.indexer is not None and latent.rope is not None
    if latent.indexer.head_dim < latent.rope_dim:
        raise UserError(f"{c.source}: 'index_head_dim' {latent.indexer.head_dim} is below 'qk_rope_head_dim'.")
    style = latent.rope.is_neox_style  # the indexer's heads rotate as those of attention do
    indexer = replace(latent.indexer, is_neox_style=style, rotary_last=True, key_eps=eps)
    return replace(latent, indexer=indexer, gate=ElementGate(own_projection=True), sinks=True, norms=LatentNorms())


def _streams(c: Config) -> HyperConnections:
    eps = c.default("hc_eps", float, 1e-6)
    return HyperConnections(c.positive("hc_mult"), 0, eps, magnitude=c.default("hc_magnitude", float, 2.0))


_NAMES = WeightMap(
    {**MODEL_NAMES, "head_mix": "model"},
    {
        **ATTENTION_NAMES,
        **LATENT_NAMES,
        "attn.gate": "self_attn.linear_gate",
        "attn_mix": "",
        "mlp_mix": "",
        **MLP_NAMES,
        **EXPERT_NAMES,
        "moe.experts": "mlp.experts",
        **SHARED_NAMES,
    },
    aliases=(*CACHE_SCALE_ALIASES, (".self_attn.learnable_sink_param", ".self_attn.sinks")),
    # Transformers writes gates of every kind under one name, and `hc_pre` at another place.
    renamings=(
        (r"\.hc_pre\.", "."),
        (r"\.hc_attn_layer\.hc_", ".hc_attn_"),
        (r"\.hc_mlp_layer\.hc_", ".hc_ffn_"),
        (r"\.hc_head\.(?:hc_head_|hc_)", ".hc_head_"),
        (r"\.mlp\.((?:shared_experts\.)?)linear_gate\.", r".mlp.\1gate_proj."),
        (r"\.self_attn\.gate_proj\.", ".self_attn.linear_gate."),
    ),
    modules=(("self_attn.gate_proj", "self_attn.linear_gate"),),
    behind=("model.hc_head_",),
    unread=("model.mtp_layers.",),
)

HY_V4 = Family(
    title="Hy4",
    model_types=("hy_v4",),
    architectures=("HYV4ForCausalLM",),
    read=hy_v4,
    names=_NAMES,
)


def hy_v4_vl(c: Config) -> Model:
    """Returns the text model beside an image encoder. Its heads rotate in pairs; its rotary sections differ for images
    alone, as tokens of text have one position in all of them."""
    rope = c.default("rope_parameters", dict, {})
    of_text = {key: value for key, value in rope.items() if key != "mrope_section"}
    return hy_v4(c.usual({"rope_interleave": True}).with_values({"rope_parameters": of_text}))


HY_V4_VL = replace(
    HY_V4,
    model_types=("hy_v4_vl", "hy_v4_vl_text"),
    architectures=("HYV4VLForConditionalGeneration",),
    read=hy_v4_vl,
    names=replace(
        _NAMES,
        beginnings=(("model.language_model.", "model."),),
        unread=(*_NAMES.unread, "vit.", "model.vit.", "model.vision_tower.", "model.patch_merger."),
    ),
)
