"""Launch variants of block-sparse attention and its indexer, described for the ledger."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sglang.ledger.form_rule import FormRule
from sglang.ledger.variant import Variant
from sglang.ledger.variants.sparse import merges, tile_variants, tiles_of
from sglang.srt.blocks.block_selection.kernels import block_scores
from sglang.srt.layers.attention.triton_ops import block_attention

OPS = ("block_indexer", "block_attention")

BLOCK = 128
"""Tokens of MiniMax-M3's blocks."""
ELEMENTS: Mapping[str, str] = {"bfloat16": "*bf16", "fp8_e4m3": "*fp8e4nv", "fp8_e5m2": "*fp8e5"}

_TABLES = frozenset({"req_pool_indices_ptr", "counts_ptr", "lens_ptr"})
_STRIDES = ("stride_qt", "stride_qh", "stride_ot", "stride_oh", "stride_kcs", "stride_kch", "stride_vcs", "stride_vch")
FORM_RULES = {
    "block_scores.block_scores_kernel": FormRule(
        at_most=frozenset({"ROWS"}),
        counts=_TABLES
        | {"num_rows", "num_heads", "num_parts", "top_blocks", "local_blocks", "stride_rt", "stride_token"},
    ),
    "block_attention.block_attention_kernel": FormRule(
        at_most=frozenset({"PER_GROUP"}),
        counts=_TABLES | {"num_heads", "group", "num_head_tiles", "num_splits", "stride_slots"},
    ),
}


def variants(op: str, features: tuple[str, ...] = ()) -> Iterator[Variant]:
    """Variants of `op` for a GPU with `features` (they decide which preferred tiles come on top)."""
    if op == "block_indexer":
        yield from _scores(features)
    else:
        yield from _attention(features)
        yield from merges("block_attention", "merge", 128, False)


def _types(kernel: Any) -> dict[str, str]:
    return {name: "*i32" if name.endswith("_ptr") else "i32" for name in kernel.arg_names if not name.isupper()}


def _scores(features: tuple[str, ...]) -> Iterator[Variant]:
    """Yields the variants for as many columns as a tile has, however many heads a rank has."""
    kernel = block_scores.block_scores_kernel
    for head_dims, kv_dtype, tile in tiles_of("block_indexer", features, ELEMENTS):
        for heads in (1, 2, 4, 8, block_scores.MIN_COLUMNS):
            types = _types(kernel)
            types |= {"q_ptr": "*bf16", "keys_ptr": "*bf16", "scores_ptr": "*fp32", "req_pool_indices_ptr": "*i64"}
            constants = {"HEADS": heads, "DIM": head_dims[0], "ROWS": tile["BLOCK_M"] // heads, "BLOCK": BLOCK}
            name = "plain" if heads == 1 else f"{heads} columns"
            key = f"{head_dims[0]}x{head_dims[1]}/bfloat16/{kv_dtype}/{name}"
            strides = ("stride_qt", "stride_keys", "stride_head")
            yield tile_variants("block_indexer", key, kernel, types, constants, tile, strides)


def _attention(features: tuple[str, ...]) -> Iterator[Variant]:
    kernel = block_attention.block_attention_kernel
    for head_dims, kv_dtype, tile in tiles_of("block_attention", features, ELEMENTS):
        element = ELEMENTS[kv_dtype]
        types = _types(kernel) | {"q_ptr": "*bf16", "o_ptr": "*bf16", "k_cache_ptr": element, "v_cache_ptr": element}
        types |= {"part_o_ptr": "*fp32", "part_lse_ptr": "*fp32", "scale": "fp32", "v_scale": "fp32"}
        key = f"{head_dims[0]}x{head_dims[1]}/bfloat16/{kv_dtype}/plain"
        constants = {"PER_GROUP": True, "DIM": head_dims[0], "BLOCK": BLOCK}
        yield tile_variants("block_attention", key, kernel, types, constants, tile, _STRIDES)
