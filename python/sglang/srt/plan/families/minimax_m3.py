"""MiniMax M3 and M3.1: grouped-query attention over selected blocks of tokens, Gemma's norms, a part of each head
rotates, experts are w1, w2, w3 with GPT-OSS's gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from sglang.srt.blocks.block_selection.spec import BlockIndexer
from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.blocks.moe.spec import Router, Shared
from sglang.srt.configs.activation import GPT_OSS_SWIGLU
from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.errors import UserError
from sglang.srt.plan.attention_parts import PerHead
from sglang.srt.plan.families.attention import FULL, grouped_attention, layer_kinds, mixers_by_kind
from sglang.srt.plan.families.blocks import activation, experts, ffn_by_layer, flagged_layers, mlp, shared_experts
from sglang.srt.plan.families.config import Config
from sglang.srt.plan.families.family import Family, Model, StoredNorms, layers_of
from sglang.srt.plan.layer_spec import Mixer
from sglang.srt.plan.masks import SelectedBlocks
from sglang.srt.plan.weight_names import (
    ATTENTION_NAMES,
    BLOCK_INDEX_NAMES,
    MODEL_NAMES,
    QK_NORM_NAMES,
    W123_NAMES,
    W123_PARTS,
    WeightMap,
)

_LANGUAGE_MODEL = "language_model.model."
_NAMES = WeightMap(
    MODEL_NAMES,
    {
        **ATTENTION_NAMES,
        **QK_NORM_NAMES,
        **BLOCK_INDEX_NAMES,
        **W123_NAMES,
        "mlp.gate_up": "mlp.{own}_proj",
        "mlp.down": "mlp.down_proj",
        "moe.shared.gate_up": "block_sparse_moe.shared_experts.{own}_proj",
        "moe.shared.down": "block_sparse_moe.shared_experts.down_proj",
    },
    parts=W123_PARTS,
    modules=(
        ("mlp.shared_experts.", "block_sparse_moe.shared_experts."),
        ("self_attn.indexer.", "self_attn.index_"),
    ),
).below(_LANGUAGE_MODEL)

BLOCK_CONFIG = "sparse_attention_config"
_BLOCK_SPARSE = "minimax_m3_sparse"
"""Kind of layers with attention to blocks, as transformers names it in `layer_types`."""
_FLAT: Mapping[str, str] = {
    "sparse_num_index_heads": "index_n_heads",
    "sparse_index_dim": "index_head_dim",
    "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks",
}
"""Keys inside `sparse_attention_config`, and those that transformers writes instead, next to the other keys."""
_COMPUTED: Mapping[str, tuple[object, ...]] = {"sparse_score_type": ("max",), "sparse_init_block": (0,)}
_OTHERS = frozenset({"use_sparse_attention", "sparse_attention_freq", "sparse_disable_index_value"})


def minimax_m3(c: Config) -> Model:
    c.only("attention_output_gate", False)
    c.only("qk_norm_type", "per_head")
    c.only("scoring_func", "sigmoid")
    c.only("use_gemma_norm", True)
    c.only("use_qk_norm", True)
    c.only("use_routing_bias", True)
    function = activation(c, GPT_OSS_SWIGLU, ("swigluoai", "silu"))  # transformers writes silu for it
    attention = partial(grouped_attention, qk_norm=PerHead(fp32=True))

    def block_sparse(c: Config) -> GQA:
        heads = attention(c)
        return replace(heads, mask=SelectedBlocks(_block_indexer(c, heads.num_kv_heads)))

    kinds: dict[str, Callable[[Config], Mixer]] = {FULL: attention, _BLOCK_SPARSE: block_sparse}
    mixers = mixers_by_kind(c, _block_sparse_layers(c) or layer_kinds(c), kinds)
    router = Router(0, "sigmoid", correction="e_score_correction_bias", exact_logits=True)
    blocks = ffn_by_layer(
        flagged_layers(c), lambda: mlp(c, function), lambda: experts(c, router, function, shared=_shared(c))
    )
    return Model(c, layers_of(mixers, blocks), norms=StoredNorms(zero_centred=True))


def _shared(c: Config) -> Shared | None:
    size = c.count("shared_intermediate_size")
    return Shared((c.count("n_shared_experts") or 1) * size) if size else shared_experts(c)


def _block_sparse_layers(c: Config) -> list[str] | None:
    """Returns the kind of each layer by `sparse_attention_config`; None: there is no such key, so `layer_types` count.
    Raises UserError for malformed values."""
    inner = c.default(BLOCK_CONFIG, dict, {})
    if not inner:
        return None
    flags = _flags(inner, "sparse_attention_freq", c.num_layers, c.source)
    on = inner.get("use_sparse_attention", True)
    return [_BLOCK_SPARSE if flag and on else FULL for flag in flags]


def _block_indexer(c: Config, kv_heads: int) -> BlockIndexer:
    """Reads the indexer of a model with `kv_heads` KV heads. Raises UserError."""
    inner, source = c.default(BLOCK_CONFIG, dict, {}), f"{c.source} {BLOCK_CONFIG}"
    unknown = sorted(inner.keys() - _FLAT.keys() - _COMPUTED.keys() - _OTHERS)
    if unknown:
        raise UserError(f"{source}: keys {', '.join(unknown)} are not described here yet.")
    for key, allowed in _COMPUTED.items():
        if inner.get(key, allowed[0]) not in allowed:
            c.problems.append(f"{source}: {key} = {inner[key]!r} is not supported; supported: {allowed[0]!r}.")
    sparse = _flags(inner, "sparse_attention_freq", None, source)
    without_values = _flags(inner, "sparse_disable_index_value", None, source)
    if any(layer and not disabled for layer, disabled in zip(sparse, without_values, strict=False)):
        c.problems.append(
            f"{source}: layers whose indexer has values (sparse_disable_index_value 0) are not supported."
        )
    stated = c.with_values({usual: inner[key] for key, usual in _FLAT.items() if key in inner})
    reader = ConfigReader(stated.values, source)
    heads = reader.positive("index_n_heads")
    if heads != kv_heads:
        raise UserError(f"{source}: {heads} index heads for {kv_heads} KV heads, of which each takes one.")
    indexer = BlockIndexer(
        head_dim=reader.positive("index_head_dim"),
        block=reader.positive("index_block_size"),
        top_blocks=reader.positive("index_topk_blocks"),
        local_blocks=reader.positive("index_local_blocks", 1),
    )
    if indexer.local_blocks > indexer.top_blocks:
        raise UserError(f"{source}: {indexer.local_blocks} local blocks are more than the {indexer.top_blocks} chosen.")
    return indexer


def _flags(values: Mapping[str, Any], key: str, count: int | None, source: str) -> list[int]:
    """Returns the list of 0 and 1 under `key`, of `count` entries where that is given; empty without the key."""
    flags = values.get(key, [])
    if not isinstance(flags, list) or any(type(flag) is not int or flag not in (0, 1) for flag in flags):
        raise UserError(f"{source}: {key!r} must be a list of 0 and 1; got {flags!r}.")
    if count is not None and len(flags) < count:
        raise UserError(f"{source}: {key!r} has {len(flags)} entries for {count} layers.")
    return flags[:count]


MINIMAX_M3 = Family(
    title="MiniMax M3 and M3.1",
    model_types=("minimax_m3_vl", "minimax_m3"),
    architectures=("MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3SparseForCausalLM", "MiniMaxM3VLForCausalLM"),
    read=minimax_m3,
    names=WeightMap(
        model={**_NAMES.model, "lm_head": "language_model.lm_head"},
        layer=_NAMES.layer,
        layer_prefix=_NAMES.layer_prefix,
        decoder=_NAMES.decoder,
        parts=_NAMES.parts,
        modules=_NAMES.modules,
        # Checkpoints with the language model alone have the names on the left.
        beginnings=(("model.", _LANGUAGE_MODEL), ("lm_head.", "language_model.lm_head.")),
        unread=(
            *("vision_tower.", "multi_modal_projector.", "patch_merge_mlp."),
            *("mtp.", "language_model.mtp.", f"{_LANGUAGE_MODEL}mtp."),
        ),
    ),
)
