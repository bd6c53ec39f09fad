"""DeepSeek-V4: attention over a window and compressed entries, hyper-connections, first layers routed by token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sglang.srt.blocks.compressed.spec import CompressedSparse
from sglang.srt.blocks.hyper_connections.spec import HyperConnections
from sglang.srt.blocks.moe.spec import Router
from sglang.srt.configs.hf_config import ConfigReader, bounded
from sglang.srt.drafts.mtp.spec import ByStream
from sglang.srt.errors import UserError
from sglang.srt.plan.families.blocks import experts, shared_experts
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.family import Family, Model, layers_of
from sglang.srt.plan.families.latent import indexer_of
from sglang.srt.plan.families.mtp import MTPPass, MTPTensors, one_layer
from sglang.srt.plan.layer_spec import SUM, Mixer, Sum
from sglang.srt.plan.weight_names import USUALLY_IGNORED, W123_PARTS, WeightMap

LAYER_NAMES = {
    "input_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    "attn_mix": "",
    "mlp_mix": "",
    "attn": "attn",
    "attn.q_a": "attn.wq_a",
    "attn.q_norm": "attn.q_norm",
    "attn.q_b": "attn.wq_b",
    "attn.kv": "attn.wkv",
    "attn.kv_norm": "attn.kv_norm",
    "attn.o_a": "attn.wo_a",
    "attn.o_b": "attn.wo_b",
    "attn.compressor": "attn.compressor.{part}",
    "attn.compressor.places": "attn.compressor",
    "attn.compressor.norm": "attn.compressor.norm",
    "attn.index_compressor": "attn.indexer.compressor.{part}",
    "attn.index_compressor.places": "attn.indexer.compressor",
    "attn.index_compressor.norm": "attn.indexer.compressor.norm",
    "attn.index_q": "attn.indexer.wq_b",
    "attn.index_weights": "attn.indexer.weights_proj",
    "moe.router": "ffn.gate",
    "moe.correction": "ffn.gate",
    "moe.hash": "ffn.gate",
    "moe.w13": "ffn.experts.{expert}.{part}",
    "moe.w2": "ffn.experts.{expert}.{part}",
    "moe.shared.gate_up": "ffn.shared_experts.{part}",
    "moe.shared.down": "ffn.shared_experts.w2",
}
NAMES = WeightMap(
    {"embed": "embed", "norm": "norm", "lm_head": "head", "head_mix": ""},
    LAYER_NAMES,
    layer_prefix="layers.{layer}.",
    # Exports that follow DeepSeek-V3 name the FP8 scales like it.
    aliases=((".weight_scale_inv", ".scale"),),
    decoder="",
    parts=W123_PARTS,
    modules=(
        ("self_attn.q_a_proj", "attn.wq_a"),
        ("self_attn.q_b_proj", "attn.wq_b"),
        ("self_attn.kv_proj", "attn.wkv"),
        ("self_attn.o_b_proj", "attn.wo_b"),
        ("self_attn.compressor.indexer.q_b_proj", "attn.indexer.wq_b"),
        ("mlp.shared_experts.gate_proj", "ffn.shared_experts.w1"),
        ("mlp.shared_experts.up_proj", "ffn.shared_experts.w3"),
        ("mlp.shared_experts.down_proj", "ffn.shared_experts.w2"),
    ),
    behind=("hc_head_",),
    # The bias for image tokens is not loaded where images are not served, and in drafts, which propose text. Editions
    # with images have one for texts also in layers whose experts token ids choose.
    ignore=(*USUALLY_IGNORED, "ffn.gate.bias", "ffn.gate.bias_vl"),
    unread=("mtp.", "vision.", "aligner.", "image_"),
)
"""Names of tensors as published, without a prefix. `mtp.` are layers that only drafts (such as DSpark's) use."""


_USUAL = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "swiglu_limit": 10.0, "norm_topk_prob": True}
_PUBLISHED = {256: {**_USUAL, "routed_scaling_factor": 1.5}, 384: {**_USUAL, "routed_scaling_factor": 2.5}}
"""Values of the FP8 exports of Flash and Pro, which state little else than sizes, by the number of experts."""
INDEXED_RATE = 4
"""Layers of this compression rate have an indexer; those of a higher one attend to every entry."""


def deepseek_v4(c: Config) -> Model:
    c = c.usual(_PUBLISHED.get(c.count("n_routed_experts"), {}))
    indexed = [compressed_sparse(c, rate, indexed=rate == INDEXED_RATE, head_norm=True) for rate in compress_ratios(c)]
    router = Router(0, "sqrtsoftplus", correction="bias", exact_logits=True, image_correction="bias_vl")
    return v4_model(c, indexed, router)


def v4_model(c: Config, mixers: Sequence[Mixer], router: Router, lagged: bool = False) -> Model:
    """Returns a model of these mixers with what DeepSeek V4 and V4.1 share: experts, of which the first
    `num_hash_layers` layers choose by token ids, between hyper-connections (`lagged`: as HyperConnections.lagged)."""
    c.only("attention_bias", False)
    c.only("mlp_bias", False)
    c.only("hidden_act", "silu")
    c.only("norm_topk_prob", True)
    c.only("num_key_value_heads", 1)
    c.only("scoring_func", "sqrtsoftplus")
    c.only("topk_method", "noaux_tc")
    moe = experts(c, router, shared=shared_experts(c))
    by_ids = replace(moe.router, hash_table="tid2eid", correction="")
    first = replace(moe, router=by_ids, vocab_size=c.positive("vocab_size"))
    hashed = c.count("num_hash_layers")
    blocks = [first if i < hashed else moe for i in range(c.num_layers)]
    return Model(c, layers_of(mixers, blocks, hyper_connections(c, lagged=lagged)))


def hyper_connections(c: Config, *, mean_head: bool = False, lagged: bool = False) -> HyperConnections | Sum:
    """Returns the connections of several residual streams. `mean_head`, `lagged`: as in HyperConnections."""
    streams = c.count("hc_mult")
    if streams <= 1:
        return HyperConnections(4, mean_head=mean_head, lagged=lagged) if mean_head or lagged else SUM
    lagged = c.default("hc_pre_from_prev_sublayer", bool, lagged)
    rounds, eps = c.positive("hc_sinkhorn_iters", 20), c.default("hc_eps", float, 1e-6)
    return HyperConnections(streams, rounds, eps, mean_head, lagged)


def compress_ratios(c: Config) -> list[Any]:
    """Returns how many tokens an entry stands for in each layer; 0: a window alone. Raises UserError."""
    if c.values.get("compress_ratios") is None:
        raise UserError(f"{c.source}: the key 'compress_ratios' is missing.")
    return c.by_layer("compress_ratios", 0)


def compressed_sparse(c: Config, rate: Any, *, indexed: bool, head_norm: bool) -> CompressedSparse:
    """Returns attention over a window and entries of `rate` tokens. `head_norm`: heads of q are normed where the config
    does not say it. Raises UserError."""
    if isinstance(rate, bool) or not isinstance(rate, int) or rate == 1:
        raise UserError(f"{c.source}: 'compress_ratios' must be 0 or whole numbers above 1; got {rate!r}.")
    rope_dim, groups = c.positive("qk_rope_head_dim"), c.positive("o_groups")
    heads = c.positive("num_attention_heads")
    if heads % groups:
        raise UserError(f"{c.source}: 'o_groups' {groups} does not divide the {heads} attention heads.")
    return CompressedSparse(
        num_heads=heads,
        head_dim=c.positive("head_dim"),
        rope_dim=rope_dim,
        q_lora_rank=c.positive("q_lora_rank"),
        o_lora_rank=c.positive("o_lora_rank"),
        o_groups=groups,
        window=c.positive("sliding_window"),
        rope=c.rope(rope_dim, **_rotary_keys(c, rate)),
        rate=bounded("compress_ratios", rate, c.source),
        indexer=indexer_of(c) if indexed else None,
        head_norm=c.default("q_head_norm", bool, head_norm),
    )


def _rotary_keys(c: Config, rate: int) -> dict[str, Any]:
    """Returns the rotary keys of a layer with this compression rate. Layers that do not compress use the plain
    frequencies; those that compress do not scale cosines and sines, whatever YaRN says."""
    if not rate:
        return {"rope_scaling": None}
    scaling = c.default("rope_scaling", dict, {})
    unscaled = {"rope_scaling": {**scaling, "attention_factor": 1.0}} if scaling else {}
    return {"rope_theta": c.values.get("compress_rope_theta") or 160000.0, **unscaled}


def _draft_keys(keys: ConfigReader) -> dict[str, Any]:
    return one_layer(keys) | {"compress_ratios": [0], "num_hash_layers": 0}


_MTP = MTPPass(
    tensors=MTPTensors(
        at="mtp.0.",
        names={
            "e_proj": "e_proj",
            "h_proj": "h_proj",
            "embedding_norm": "enorm",
            "hidden_norm": "hnorm",
            "norm": "norm",
            "head_mix": "",
        },
        unread=("emb.", "embed.", "head."),
    ),
    form=lambda residual: ByStream(residual.streams),
    keys=_draft_keys,
)
"""Editions since July 2026 bring a DSpark draft instead."""


DEEPSEEK_V4 = Family(
    title="DeepSeek V4",
    # V4's FP8 exports use the second name.
    model_types=("deepseek_v4", "deepseek_ref"),
    architectures=("DeepseekV4ForCausalLM",),
    read=deepseek_v4,
    names=NAMES,
    mtp=_MTP,
)
