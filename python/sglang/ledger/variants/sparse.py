"""Launch variants of sparse attention and its indexer, described for the ledger."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from sglang.ledger.form_rule import FormRule
from sglang.ledger.variant import Variant, describe
from sglang.srt.blocks.mla.kernels import latent_pack
from sglang.srt.kernels import tiles
from sglang.srt.layers.attention.entry_shares import MAX_SHARES
from sglang.srt.layers.attention.triton_ops import index_logits, select_entries, sparse_attention
from sglang.srt.layers.attention.triton_ops.sparse_packed import packed_attention_kernel
from sglang.srt.layers.attention.triton_ops.sparse_steps import merge_shares_kernel
from sglang.srt.layers.triton_ops import index_rope, index_store

OPS = (
    *("index_norm_rope", "index_key_store", "index_queries", "sparse_indexer", "sparse_attention"),
    "latent_pack_store",
)

INDEX_HEADS = (64, 32)
"""Heads of the indexers of DeepSeek, and of GLM."""
POOLED_HEADS = 4
"""Heads of the indexer of Qwen3.8, which has a key for each block of tokens, in 16 bits."""
INDEX_DIM = 128
ROTARY_DIM = 64
ELEMENTS: Mapping[str, str] = {"bfloat16": "*bf16", "fp8_e4m3": "*fp8e4nv"}

_OUTPUTS = {"o_ptr": "*bf16", "lse_ptr": "*fp32", "sinks_ptr": "*fp32", "part_o_ptr": "*fp32", "part_lse_ptr": "*fp32"}
# Names of kernel parameters, which the rules and variants below share.
_ROW_STRIDES = ("stride_qt", "stride_qh", "stride_ot", "stride_oh")
_OPTIONS = frozenset({"HAS_MORE", "HAS_SINKS", "HAS_LSE"})
_COUNTS_AND_OFFSETS = frozenset({"num_heads", "num_head_tiles", "num_splits", "stride_slots", "stride_more_slots"})
_SECOND_CACHE = ("more_cache_ptr", "more_slots_ptr", "more_counts_ptr", "stride_more_cs", "stride_more_slots")
_UNREAD_WITHOUT = {"HAS_SINKS": ("sinks_ptr",), "HAS_LSE": ("lse_ptr",)}
FORM_RULES = {
    "sparse_attention.sparse_attention_kernel": FormRule(
        at_most=_OPTIONS,
        counts=_COUNTS_AND_OFFSETS | {"counts_ptr", "more_counts_ptr"},
        absent={**_UNREAD_WITHOUT, "HAS_MORE": _SECOND_CACHE},
    ),
    "sparse_packed.packed_attention_kernel": FormRule(
        at_most=_OPTIONS, counts=_COUNTS_AND_OFFSETS | {"counts_ptr"}, absent=_UNREAD_WITHOUT
    ),
    "sparse_steps.merge_shares_kernel": FormRule(
        at_most=_OPTIONS | {"SHARES"}, counts=frozenset({"num_splits", "num_heads"}), absent=_UNREAD_WITHOUT
    ),
    "index_logits.index_logits_kernel": FormRule(
        at_most=frozenset({"ROWS"}),
        counts=frozenset({"num_rows", "num_parts", "top_k", "rate", "stride_rt", "stride_logits", "stride_scales"}
                         | {"req_pool_indices_ptr", "counts_ptr"}),
        absent={"QUANTIZED": ("scales_ptr",)},
    ),
    "select_entries.select_entries_kernel": FormRule(
        counts=frozenset({"num_parts", "top_k", "rate", "stride_rt", "stride_kept", "stride_out"}
                         | {"counts_ptr", "req_pool_indices_ptr", "chosen_ptr"})
    ),
    "index_rope.index_norm_rope_kernel": FormRule(
        free=frozenset({"QUERY_HEADS"}),
        at_most=frozenset({"INTERLEAVED"}),
        counts=frozenset({"first_query", "query_tokens", "key_stride"}),
    ),
    "latent_pack.latent_pack_store_kernel": FormRule(counts=frozenset({"entry_stride"})),
    "index_store.index_key_store_kernel": FormRule(
        counts=frozenset({"num_rows", "scale_stride", "out_cache_loc_ptr"}), absent={"QUANTIZED": ("scales_ptr",)}
    ),
    "index_store.index_queries_kernel": FormRule(
        free=frozenset({"HEADS"}), counts=frozenset({"num_rows", "weight_stride"})
    ),
}  # fmt: skip


def variants(op: str, features: tuple[str, ...] = ()) -> Iterator[Variant]:
    """Yields the launch variants of one of OPS for a GPU with `features`, which decide about tiles that are preferred
    there."""
    if op == "index_norm_rope":
        yield from _norms_and_rotations()
    elif op == "latent_pack_store":
        yield _packing()
    elif op == "index_key_store":
        yield from _key_stores()
    elif op == "index_queries":
        yield from _queries()
    elif op == "sparse_indexer":
        yield from _scores(features)
        yield from _selections()
    else:
        yield from _attention(features)
        yield from merges("sparse_attention", "merge", 512, True)


def tiles_of(
    op: str, features: tuple[str, ...], kv_dtypes: Iterable[str] = ELEMENTS
) -> Iterator[tuple[tuple[int, int], str, Mapping[str, int]]]:
    """Yields (head dims of keys and values, dtype of the cache, tile) for every combination that `tiles.ROWS` has of
    the op."""
    for row in tiles.ROWS:
        if row.op == op:
            for tile in row.candidates(features):
                for head_dims in row.head_dims:
                    for kv_dtype in kv_dtypes:
                        if tiles.KV_BYTES[kv_dtype] in row.kv_bytes:
                            yield head_dims, kv_dtype, tile


def _norms_and_rotations() -> Iterator[Variant]:
    """Yields the kernel that norms index keys and rotates keys and queries, for the heads that a program may have."""
    kernel = index_rope.index_norm_rope_kernel
    types = {"keys": "*bf16", "normed": "*bf16", "queries": "*bf16", "positions": "*i64", "cos_sin": "*fp32"}
    types |= {"weight": "*fp32", "bias": "*fp32", "eps": "fp32"}
    types |= dict.fromkeys(("first_query", "query_tokens", "key_stride"), "i32")
    for heads in (1, 4, 8):
        constants = {"QUERY_HEADS": INDEX_HEADS[0], "DIM": INDEX_DIM, "ROT": ROTARY_DIM, "INTERLEAVED": True}
        launch = index_rope.launch_constants(INDEX_DIM, ROTARY_DIM, heads)
        yield describe("index_norm_rope", f"{INDEX_DIM}r{ROTARY_DIM}/{heads}", kernel, types, constants, launch)


def _packing() -> Variant:
    """Returns the kernel that packs latents into an e4m3 cache."""
    types = {"entries": "*bf16", "numbers": "*fp8e4nv", "scales": "*fp32", "rotary": "*bf16"}
    types |= {"out_cache_loc": "*i64", "entry_stride": "i32"}
    constants = {"RANK": latent_pack.RANK, "ROT": latent_pack.ROT, "GROUP": latent_pack.GROUP}
    kernel = latent_pack.latent_pack_store_kernel
    return describe("latent_pack_store", "512r64", kernel, types, constants, latent_pack.LAUNCH)


def _key_stores() -> Iterator[Variant]:
    """Yields the kernel that stores index keys, for each dtype of the cache."""
    kernel = index_store.index_key_store_kernel
    for kv_dtype, element in ELEMENTS.items():
        types = {
            "keys_ptr": "*bf16", "cache_ptr": element, "scales_ptr": "*fp32", "out_cache_loc_ptr": "*i64",
            "num_rows": "i32", "key_stride": "i32", "slot_stride": "i32", "scale_stride": "i32",
        }  # fmt: skip
        constants = {"DIM": INDEX_DIM, "QUANTIZED": kv_dtype == "fp8_e4m3"}
        strides = ("key_stride", "slot_stride")
        yield describe("index_key_store", kv_dtype, kernel, types, constants, index_store.LAUNCH, strides)


def _queries() -> Iterator[Variant]:
    """Yields the kernel that quantizes index queries and scales their weights, for each dtype of these weights."""
    for weights in ("*fp32", "*bf16"):
        types = {
            "q_ptr": "*bf16", "weights_ptr": weights, "out_ptr": "*fp8e4nv", "out_weights_ptr": "*fp32",
            "num_rows": "i32", "scale": "fp32", "q_stride": "i32", "head_stride": "i32", "weight_stride": "i32",
        }  # fmt: skip
        constants, strides = {"HEADS": INDEX_HEADS[0], "DIM": INDEX_DIM}, ("q_stride", "head_stride", "weight_stride")
        key = f"weights_{weights.removeprefix('*')}"
        kernel = index_store.index_queries_kernel
        yield describe("index_queries", key, kernel, types, constants, index_store.LAUNCH, strides)


def _scores(features: tuple[str, ...]) -> Iterator[Variant]:
    """Yields the kernel of the indexer's scores with as many tokens as fit into a block: launches with fewer cost
    less."""
    kernel = index_logits.index_logits_kernel
    for head_dims, kv_dtype, tile in tiles_of("sparse_indexer", features):
        for heads in (*INDEX_HEADS, *((POOLED_HEADS,) if kv_dtype == "bfloat16" else ())):
            element = ELEMENTS[kv_dtype]
            types = {name: "i32" for name in kernel.arg_names if not name.isupper()}
            types |= {"q_ptr": element, "keys_ptr": element, "weights_ptr": "*fp32", "scales_ptr": "*fp32"}
            types |= {"logits_ptr": "*fp32", "req_to_token_ptr": "*i32", "counts_ptr": "*i32"}
            types["req_pool_indices_ptr"] = "*i64"
            rows = min(tile["BLOCK_M"] // heads, index_logits.MAX_TOKENS)
            constants = {"HEADS": heads, "DIM": INDEX_DIM, "ROWS": rows, "QUANTIZED": kv_dtype == "fp8_e4m3"}
            name = "plain" if heads == INDEX_HEADS[0] else f"{heads} heads"
            key = f"{head_dims[0]}x{head_dims[1]}/bfloat16/{kv_dtype}/{name}"
            yield tile_variants(
                "sparse_indexer", key, kernel, types, constants, tile, ("stride_keys",), ("stride_scales",)
            )


def _selections() -> Iterator[Variant]:
    """Yields the kernel that selects the entries with the highest scores, for each of its launches and levels."""
    kernel = select_entries.select_entries_kernel
    for launch in select_entries.LAUNCHES:
        for level in range(select_entries.LEVELS):
            types = _index_types(kernel)
            key = f"select/{launch['TILE']}/{level}"
            yield describe("sparse_indexer", key, kernel, types, {"LEVEL": level}, launch, ("stride_logits",))


def _index_types(kernel: Any) -> dict[str, str]:
    """Returns the types of a selection kernel's run-time parameters: int32 but for logits and request slots."""
    types = {name: "*i32" if name.endswith("_ptr") else "i32" for name in kernel.arg_names if not name.isupper()}
    types["logits_ptr"] = "*fp32"
    return types | ({"req_pool_indices_ptr": "*i64"} if "req_pool_indices_ptr" in types else {})


def _attention(features: tuple[str, ...]) -> Iterator[Variant]:
    """Yields the kernel of attention to selected tokens with every option on, since launches with fewer cost less:
    sinks, log-sum-exps, and a second cache where keys and values are the same columns."""
    for head_dims, kv_dtype, tile in tiles_of("sparse_attention", features):
        packed = kv_dtype == "fp8_e4m3"
        kernel = packed_attention_kernel if packed else sparse_attention.sparse_attention_kernel
        types = {
            name: "*i32" if name.endswith(("slots_ptr", "counts_ptr")) else "*bf16" if name.endswith("_ptr") else "i32"
            for name in kernel.arg_names
            if not name.isupper()
        }
        types |= {**_OUTPUTS, "scale": "fp32"}
        constants: dict[str, Any] = {"HAS_SINKS": True, "HAS_LSE": True}
        divisible: tuple[str, ...] = _ROW_STRIDES
        if packed:
            types |= {"pairs_ptr": "*i16", "scales_ptr": "*fp32"}
        else:
            rope = head_dims[0] - head_dims[1]
            constants |= {"RANK": head_dims[1], "ROPE": rope, "HAS_MORE": rope == 0}
            divisible = (*_ROW_STRIDES, "stride_cs", "stride_more_cs")
        key = f"{head_dims[0]}x{head_dims[1]}/bfloat16/{kv_dtype}/plain"
        yield tile_variants("sparse_attention", key, kernel, types, constants, tile, divisible)


def merges(op: str, key: str, rank: int, optional: bool) -> Iterator[Variant]:
    """Yields the kernel that merges the partial outputs, each of `rank` columns, of the shares into which a request's
    entries were divided: with the fewest shares and with the most. optional: with sinks and log-sum-exps."""
    types = {name: "i32" for name in merge_shares_kernel.arg_names if not name.isupper()} | _OUTPUTS
    constants = {"RANK": rank, "COLS": sparse_attention.MERGE_COLS, "HAS_SINKS": optional, "HAS_LSE": optional}
    strides = ("stride_ot", "stride_oh")
    for shares in (sparse_attention.MIN_SHARES, MAX_SHARES):
        launch = {"SHARES": shares, "num_warps": 4}
        yield describe(op, f"{key}/{shares}", merge_shares_kernel, types, constants, launch, strides)


def tile_variants(
    op: str,
    key: str,
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    tile: Mapping[str, int],
    divisible: tuple[str, ...],
    ones: tuple[str, ...] = (),
) -> Variant:
    """Returns the variant of a kernel with one tile, of which the kernel gets the entries that it has parameters for.
    divisible: names of parameters that are multiples of 16; ones: of those that are 1."""
    launch = {name: value for name, value in tile.items() if name in kernel.arg_names or name.startswith("num_")}
    # The ledger is searched by the whole tile, also by entries that are no parameters, such as BLOCK_M behind ROWS.
    return replace(describe(op, key, kernel, types, constants, launch, divisible, ones), tile=tile)
