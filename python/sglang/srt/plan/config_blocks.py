"""Reads block-sparse attention from the keys of a config.json: the indexer, and which layers have one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.configs.hf_config import ConfigReader
from sglang.srt.errors import UserError
from sglang.srt.plan.block_selection import BlockIndexer
from sglang.srt.plan.mixers import GQA, Indexer
from sglang.srt.plan.pooled_sparse import PooledSparse

BLOCK_SPARSE = "block_sparse_attention"
"""Our kind of layers with attention to blocks."""
BLOCK_CONFIG = "sparse_attention_config"
SPELLINGS: Mapping[str, str] = {"minimax_m3_sparse": BLOCK_SPARSE}
"""Kinds of layers in `layer_types` of published configs, and ours."""
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


def block_sparse_layers(keys: ConfigReader, num_layers: int) -> list[str] | None:
    """Returns the kind of each layer by `sparse_attention_config`; None: there is no such key, so `layer_types` count.
    Raises UserError for malformed values."""
    inner = keys.default(BLOCK_CONFIG, dict, {})
    if not inner:
        return None
    flags = _flags(inner, "sparse_attention_freq", num_layers, keys.source)
    on = inner.get("use_sparse_attention", True)
    return [BLOCK_SPARSE if flag and on else "full_attention" for flag in flags]


def block_indexer(keys: ConfigReader, kv_heads: int, unsupported: list[str]) -> BlockIndexer:
    """Reads the indexer of a model with `kv_heads` KV heads. Adds to `unsupported` what is not computed. Raises
    UserError."""
    inner, source = keys.default(BLOCK_CONFIG, dict, {}), f"{keys.source} {BLOCK_CONFIG}"
    unknown = sorted(inner.keys() - _FLAT.keys() - _COMPUTED.keys() - _OTHERS)
    if unknown:
        raise UserError(f"{source}: keys {', '.join(unknown)} are not described here yet.")
    for key, allowed in _COMPUTED.items():
        if inner.get(key, allowed[0]) not in allowed:
            unsupported.append(f"{source}: {key} = {inner[key]!r} is not supported; supported: {allowed[0]!r}.")
    sparse = _flags(inner, "sparse_attention_freq", None, source)
    without_values = _flags(inner, "sparse_disable_index_value", None, source)
    if any(layer and not disabled for layer, disabled in zip(sparse, without_values, strict=False)):
        unsupported.append(
            f"{source}: layers whose indexer has values (sparse_disable_index_value 0) are not supported."
        )
    reader = ConfigReader({**keys.values, **{ours: inner[key] for key, ours in _FLAT.items() if key in inner}}, source)
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


POOLED_SPELLINGS: Mapping[str, str] = {"qwen_sparse_attention": "full_attention", "indexed_attention": "full_attention"}
"""Names in `layer_types` of attention whose blocks an indexer selects by pooled keys, in configs that transformers
wrote; published ones say "full_attention"."""


def pooled_sparse(keys: ConfigReader, heads: GQA) -> PooledSparse:
    """Returns attention of these heads over the blocks that the config's indexer selects. Raises UserError."""
    block, budget = keys.positive("indexer_compress_ratio"), keys.positive("indexer_budget")
    if budget % block:
        raise UserError(
            f"{keys.source}: 'indexer_budget' {budget} is not a multiple of 'indexer_compress_ratio' {block}."
        )
    indexer = Indexer(keys.positive("indexer_n_heads"), keys.positive("indexer_head_dim"), budget // block)
    if heads.rotary_dim > indexer.head_dim:
        raise UserError(
            f"{keys.source}: 'indexer_head_dim' {indexer.head_dim} is less than the {heads.rotary_dim} rotary dims."
        )
    return PooledSparse(heads, indexer, block)
