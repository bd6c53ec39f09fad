"""Inkling, text: attention without rotation but with learned relative biases, windows in five of six layers, attention
temperature scaling; short convolutions over k, v and the output of every block; shared experts that the router weights;
a normed embedding, logits divided by a width."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.blocks.moe.spec import MoE, Router
from sglang.srt.blocks.short_convolution.spec import ShortConvolution
from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.drafts.mtp_by_layer.spec import MTPByLayer
from sglang.srt.errors import UserError
from sglang.srt.plan.attention_parts import (
    NO_BIASES,
    AttentionTemperature,
    KVConvolution,
    PerHead,
    RelativeBias,
    Softmax,
)
from sglang.srt.plan.families.attention import grouped_attention, with_window_heads
from sglang.srt.plan.families.blocks import experts, ffn_by_layer, mlp, shared_experts, sparse_layers
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.family import Embedding, EmbeddingNorm, Family, Logits, Model
from sglang.srt.plan.families.mtp import MTPLayerPerToken, MTPTensors, windowed_layers
from sglang.srt.plan.layer_spec import LayerSpec
from sglang.srt.plan.weight_names import WeightMap


def _numbers(stored: str, ours: str) -> tuple[tuple[str, str], ...]:
    """Returns pairs of name endings (stored, ours) of the scales of NVFP4 weights."""
    names = {"scale": "weight_scale", "scale2": "weight_scale_2", "input_amax": "input_scale"}
    return tuple((f".mlp.experts.{stored}.{leaf}", f".mlp.experts.{ours}_{name}") for leaf, name in names.items())


_OWN_NAMES = {
    "sliding_window_size": "sliding_window",
    "route_scale": "routed_scaling_factor",
    "dense_mlp_idx": "first_k_dense_replace",
}
_USUAL = {"d_rel": 16, "rel_extent": 1024, "sliding_window_size": 512, "route_scale": 8.0, "n_shared_experts": 2}
"""Values that published configs (of 256 experts) leave out."""
_ON = ("shared_expert_sink", "norm_after_topk", "use_gate_bias", "use_global_scale", "use_sconv", "use_embed_norm")
_WINDOWED, _WHOLE = "hybrid_sliding", "hybrid"
_PERIOD = 6
"""Every n-th layer has no window, where the config does not say which."""


def inkling(c: Config) -> Model:
    c.only("hidden_act", "silu")
    c.only("gate_activation", "sigmoid")
    c.only("tie_word_embeddings", False)
    for key in _ON:
        c.only(key, True)
    c.ignore("rms_norm_eps_moe_gate")  # the router has no norm
    c = (c.usual(_USUAL) if c.count("n_routed_experts") == 256 else c).renamed(_OWN_NAMES)
    router = Router(0, "sigmoid", correction="bias", exact_logits=True, scaled=True)
    blocks = ffn_by_layer(sparse_layers(c), lambda: mlp(c, alternating=True, scaled=True), lambda: _experts(c, router))
    convolution = ShortConvolution(_taps(c), c.positive("hidden_size"))
    layers = [LayerSpec(mixer, block, convolution=convolution) for mixer, block in zip(_mixers(c), blocks, strict=True)]
    divisor = c.default("logits_mup_width_multiplier", float, 1.0)
    if divisor <= 0:
        raise UserError(f"{c.source}: 'logits_mup_width_multiplier' must be more than 0; got {divisor}.")
    return Model(c, layers, embedding=Embedding(norm=EmbeddingNorm(weighted=True)), logits=Logits(1.0 / divisor))


def _experts(c: Config, router: Router) -> MoE:
    """The router weights the shared experts, too, which are one tensor."""
    moe, sinks = experts(c, router, shared=shared_experts(c), form="alternating"), c.count("n_shared_experts")
    if moe.shared is None:
        return moe
    return replace(moe, router=replace(moe.router, sinks=sinks), shared=replace(moe.shared, members=sinks))


def _taps(c: Config) -> int:
    """Returns over how many tokens convolutions go. Raises UserError for one that sees no earlier token."""
    taps = c.count("sconv_kernel_size", "conv_kernel_size") or 4
    if taps < 2:
        raise UserError(f"{c.source}: 'sconv_kernel_size' must be at least 2; got {taps}.")
    return taps


def _mixers(c: Config) -> list[GQA]:
    """Returns the attention of each layer. A layer with a window has biases for all distances in it, and twice the KV
    heads where the config does not say how many; the others have `rel_extent` biases, and attention temperature scaling
    from `log_scaling_n_floor` on."""
    kinds = _kinds(c)
    by_kind = {kind: _attention(c, c.positive("sliding_window") if kind == _WINDOWED else 0) for kind in set(kinds)}
    return [by_kind[kind] for kind in kinds]


def _attention(c: Config, window: int) -> GQA:
    mixer = grouped_attention(
        with_window_heads(c) if window else c,
        window,
        head_dim=128,
        qk_norm=PerHead(),
        biases=NO_BIASES,
        rotates=False,
        kv_convolution=KVConvolution(_taps(c)),
        attn_temperature=None if window else _temperature(c),
    )
    bias = RelativeBias(c.positive("d_rel"), window or c.positive("rel_extent"))
    return replace(mixer, softmax=Softmax(1.0 / mixer.head_dim, relative_bias=bias))  # heads are normed


def _kinds(c: Config) -> list[str]:
    local = c.values.get("local_layer_ids")
    if c.values.get("layer_types") is not None:
        kinds = [str(kind) for kind in c.require("layer_types", list)][: c.num_layers]
    elif local is not None:
        kinds = [_WINDOWED if i in c.require("local_layer_ids", list) else _WHOLE for i in range(c.num_layers)]
    else:
        kinds = [_WINDOWED if (i + 1) % _PERIOD else _WHOLE for i in range(c.num_layers)]
    unknown = sorted(set(kinds) - {_WINDOWED, _WHOLE})
    if unknown or len(kinds) < c.num_layers:
        what = ", ".join(unknown) if unknown else f"of {len(kinds)} layers for {c.num_layers}"
        raise UserError(f"{c.source}: layer_types {what} are not described here yet.")
    return kinds


def _temperature(c: Config) -> AttentionTemperature | None:
    length, scale = c.count("log_scaling_n_floor"), c.default("log_scaling_alpha", float, 0.1)
    return AttentionTemperature(scale, length, offset=1, smooth=True) if length and scale else None


_DRAFT_KEYS = {
    "num_mtp_layers": "num_nextn_predict_layers",
    "mtp_local_layer_ids": "local_layer_ids",
    "chain_hidden_post_norm": "chain_hidden_post_norm",
}
"""Names of keys for draft layers beside those of the model, and inside `mtp_config`."""


def _draft_section(keys: ConfigReader) -> ConfigReader:
    """Returns the keys of the draft layers: the config's, overridden by those for draft layers alone."""
    beside = {inner: keys.values[key] for key, inner in _DRAFT_KEYS.items() if keys.values.get(key) is not None}
    unsaid = dict.fromkeys(_DRAFT_KEYS.values())  # these keys of the config are about the model's own layers
    return ConfigReader({**keys.values, **unsaid, **beside, **keys.default("mtp_config", dict, {})}, keys.source)


def _draft_keys(keys: ConfigReader, first: int, used: int) -> dict[str, Any]:
    local = keys.default("local_layer_ids", list, [])
    kinds = [_WINDOWED if depth in local else _WHOLE for depth in range(used)]
    return windowed_layers(keys, first, used) | {"layer_types": kinds}


_MTP = MTPLayerPerToken(
    tensors=MTPTensors(
        at="model.mtp.layers.",
        layer="{layer}.transformer_block.",
        names={"fc": "input_proj", "embedding_norm": "embed_norm", "hidden_norm": "hidden_norm"},
    ),
    form=MTPByLayer(8, chained=True, final_features=True, hidden_first=True, depth_norms=False),
    section=_draft_section,
    keys=_draft_keys,
    refused={"chain_hidden_post_norm": True},
)
"""Dense layers, with convolutions. The token's embedding is the model's, which is normed, and is normed again."""


INKLING = Family(
    title="Inkling",
    model_types=("inkling", "inkling_model", "inkling_mm_model"),
    architectures=("InklingForConditionalGeneration",),
    read=inkling,
    names=WeightMap(
        {
            "embed": "model.llm.embed",
            "embed_norm": "model.llm.embed_norm",
            "norm": "model.llm.norm",
            "lm_head": "model.llm.unembed",
        },
        {
            "input_norm": "attn_norm",
            "mlp_norm": "mlp_norm",
            "attn.qkv": "attn.{part}",
            "attn.relative": "attn.wr_du",
            "attn.profiles": "attn.rel_logits_proj",
            "attn.convolution": "attn.{own}_sconv",
            "attn.q_norm": "attn.q_norm",
            "attn.k_norm": "attn.k_norm",
            "attn": "attn",
            "attn.o": "attn.wo_ud",
            "mixer_convolution": "attn_sconv",
            "ffn_convolution": "mlp_sconv",
            "mlp": "mlp",
            "mlp.gate_up": "mlp.w13_dn",
            "mlp.down": "mlp.w2_md",
            "moe.router": "mlp.gate",
            "moe.correction": "mlp.gate",
            "moe.experts": "mlp.experts",
            "moe.shared.gate_up": "mlp.shared_experts.w13",
            "moe.shared.down": "mlp.shared_experts.w2",
        },
        layer_prefix="model.llm.layers.{layer}.",
        aliases=(
            *_numbers("w13_weight", "gate_up_proj"),
            *_numbers("w2_weight", "down_proj"),
            (".mlp.experts.w13_weight", ".mlp.experts.gate_up_proj"),
            (".mlp.experts.w2_weight", ".mlp.experts.down_proj"),
            (".shared_experts.shared_w13_weight", ".shared_experts.w13.weight"),
            (".shared_experts.shared_w2_weight", ".shared_experts.w2.weight"),
        ),
        ignore=(".original_shape",),
        decoder="model.llm.",
        parts={"q": "wq_du", "k": "wk_dv", "v": "wv_dv"},
        modules=(
            ("self_attn.q_proj", "attn.wq_du"),
            ("self_attn.k_proj", "attn.wk_dv"),
            ("self_attn.v_proj", "attn.wv_dv"),
            ("self_attn.r_proj", "attn.wr_du"),
            ("self_attn.o_proj", "attn.wo_ud"),
        ),
        unread=("model.audio.", "model.visual.", "model.mtp."),
    ),
    mtp=_MTP,
)
"""The text half of published checkpoints, which have an image encoder and embeddings of sounds."""
