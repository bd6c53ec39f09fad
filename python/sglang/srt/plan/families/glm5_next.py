"""GLM-5.3-Flash (`glm5_next`): three of four layers are Kimi delta attention, every fourth is latent attention without
positions over runs of tokens that an indexer selects by pooled keys; four streams with hyper-connections."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sglang.srt.blocks.mla.spec import MLA, Indexer
from sglang.srt.blocks.moe.spec import Router
from sglang.srt.blocks.pooled_latent.spec import PooledLatent
from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.errors import UserError
from sglang.srt.plan.families.attention import RECURRENT
from sglang.srt.plan.families.blocks import experts, ffn_by_layer, mlp, shared_experts, sparse_layers
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.deepseek_v4 import hyper_connections
from sglang.srt.plan.families.family import Family, Model, layers_of
from sglang.srt.plan.families.latent import indexed_layers
from sglang.srt.plan.families.mtp import EH_PROJ, one_layer
from sglang.srt.plan.families.recurrent import KDA_CONFIG, kimi_delta
from sglang.srt.plan.layer_spec import SUM, Mixer
from sglang.srt.plan.weight_names import (
    ATTENTION_NAMES,
    EXPERT_NAMES,
    KIMI_DELTA_NAMES,
    LATENT_NAMES,
    MLP_NAMES,
    MODEL_NAMES,
    SHARED_NAMES,
    WeightMap,
)

_NAMES = WeightMap(
    MODEL_NAMES,
    {
        **ATTENTION_NAMES,
        **LATENT_NAMES,
        **KIMI_DELTA_NAMES,
        **MLP_NAMES,
        **EXPERT_NAMES,
        **SHARED_NAMES,
        "attn.index_pool": "self_attn.indexer",
        "attn_mix": "",
        "mlp_mix": "",
    },
    modules=(("self_attn.forget_gate.", "self_attn."),),
)
_BELOW = _NAMES.below("model.language_model.")

_LATENT_KINDS = frozenset({"indexed_attention", "deepseek_sparse_attention", "full_attention"})
"""Names in `layer_types` of layers that are not Kimi delta attention."""
_EVERY = 4
"""Every n-th layer is not Kimi delta attention, where the config does not name the layers."""
_ON = ("index_kpool_compress", "index_kpool_always_select_tail")
"""Keys whose default is true, the only value that is computed."""


def glm5_next(c: Config) -> Model:
    c.only("attention_bias", False)
    c.only("hidden_act", "silu")
    c.only("mhc", True)
    c.only("mla_use_nope", True)
    c.only("moe_layer_freq", 1)
    c.only("moe_router_dtype", "float32")
    c.only("scoring_func", "sigmoid")
    c.only("topk_method", "noaux_tc")
    router = Router(0, "sigmoid", correction="e_score_correction_bias", exact_logits=True)
    blocks = ffn_by_layer(sparse_layers(c), lambda: mlp(c), lambda: experts(c, router, shared=shared_experts(c)))
    return Model(c, layers_of(_mixers(c), blocks, hyper_connections(c, mean_head=True)))


def _mixers(c: Config) -> list[Mixer]:
    recurrent = _recurrent_layers(c)
    if not all(has or delta for has, delta in zip(indexed_layers(c), recurrent, strict=True)):
        c.problem("'indexer_types' with layers that take a selection is not supported.")
    rope_dim = c.count("qk_rope_head_dim")
    if rope_dim:
        c.problem(f"qk_rope_head_dim = {rope_dim} is not supported; supported: 0.")
    latent = _pooled_latent(c)
    delta = kimi_delta(c, usual_bound=-5.0) if any(recurrent) else latent
    return [delta if flag else latent for flag in recurrent]


def _recurrent_layers(c: Config) -> list[bool]:
    """Returns whether each layer is Kimi delta attention, by `layer_types` or by `kda_layers`, which counts layers from
    0 here. Raises UserError where the two differ."""
    kinds = c.default("layer_types", list, [])[: c.num_layers]
    unknown = sorted({str(kind) for kind in kinds} - _LATENT_KINDS - {RECURRENT})
    if unknown:
        raise UserError(f"{c.source}: layer_types {', '.join(unknown)} are not described here yet.")
    inner = ConfigReader(c.default(KDA_CONFIG, dict, {}), f"{c.source} {KDA_CONFIG}")
    listed = inner.default("kda_layers", list, [])
    named = [i in listed for i in range(c.num_layers)] if listed else None
    if not kinds:
        return named or [(i + 1) % _EVERY != 0 for i in range(c.num_layers)]
    recurrent = [kind == RECURRENT for kind in kinds]
    if len(kinds) < c.num_layers:
        raise UserError(f"{c.source}: 'layer_types' has {len(kinds)} entries for {c.num_layers} layers.")
    if named not in (None, recurrent):
        raise UserError(f"{c.source}: 'layer_types' and kda_layers of {KDA_CONFIG!r} name different layers.")
    return recurrent


def _pooled_latent(c: Config) -> PooledLatent:
    """Returns latent attention without positions over runs of tokens that an indexer selects by pooled keys."""
    block, budget = c.positive("index_kpool"), c.positive("index_topk")
    if budget % block:
        raise UserError(f"{c.source}: 'index_topk' {budget} is not a multiple of 'index_kpool' {block}.")
    for key in _ON:
        if not c.default(key, bool, True):
            c.problem(f"{key} = False is not supported; supported: True.")
    indexer = Indexer(c.positive("index_n_heads"), c.positive("index_head_dim"), budget // block)
    if indexer.head_dim % 4:
        raise UserError(f"{c.source}: 'index_head_dim' {indexer.head_dim} is not a multiple of 4.")
    latent = MLA(
        num_heads=c.positive("num_attention_heads"),
        q_lora_rank=c.positive("q_lora_rank"),
        kv_lora_rank=c.positive("kv_lora_rank"),
        nope_dim=c.positive("qk_nope_head_dim"),
        rope_dim=0,
        v_dim=c.positive("v_head_dim"),
    )
    return PooledLatent(latent, indexer, block)


def _draft_keys(keys: ConfigReader) -> dict[str, Any]:
    return one_layer(keys) | {KDA_CONFIG: None, "hc_mult": None}


_MTP = replace(EH_PROJ, keys=_draft_keys, layer=lambda layer: replace(layer, residual=SUM))
"""A layer behind the last one, of latent attention with an indexer, without hyper-connections."""


GLM5_NEXT = Family(
    title="GLM-5.3-Flash",
    model_types=("glm5_next",),
    architectures=("Glm5NextForConditionalGeneration",),
    read=glm5_next,
    names=replace(_BELOW, unread=("model.visual.",)),
    mtp=_MTP,
)
