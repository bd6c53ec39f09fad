"""Every attention launch that the tile table allows, described for the ledger."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton

from sglang.ledger.form_rule import FormRule
from sglang.ledger.variant import Variant
from sglang.srt.blocks.mla.kernels.latent_prompt import gather_constants, gather_latents_kernel, latent_prompt_kernel
from sglang.srt.kernels import tiles
from sglang.srt.layers.attention.triton_ops.common import split_head_dim
from sglang.srt.layers.attention.triton_ops.decode_attention import (
    SPREAD_COLS,
    combine_blocks,
    combine_kernel,
    decode_kernel,
    plan_constants,
    plan_kernel,
)
from sglang.srt.layers.attention.triton_ops.decode_biased import decode_biased_kernel
from sglang.srt.layers.attention.triton_ops.decode_fp4 import decode_fp4_kernel
from sglang.srt.layers.attention.triton_ops.extend_attention import extend_kernel
from sglang.srt.layers.attention.triton_ops.extend_biased import extend_biased_kernel
from sglang.srt.layers.attention.triton_ops.extend_fp4 import extend_fp4_kernel
from sglang.srt.layers.attention.triton_ops.latent_decode import latent_decode_kernel
from sglang.srt.layers.attention.triton_ops.prefix_parts import WHOLE
from sglang.srt.layers.triton_ops.fp4_rows import group_block

OPS = ("extend_attention", "decode_attention", "prefill_attention", "latent_prompt_attention")

KV_DTYPES: dict[str, str] = {"bfloat16": "*bf16", "fp8_e4m3": "*fp8e4nv", "fp8_e5m2": "*fp8e5", "fp4_e2m1": "*u8"}
"""float16 needs what bfloat16 needs; a uint8 pool is viewed as one of the float8 types before the launch."""

_POINTERS = {
    "sinks_ptr": "*fp32",
    "mask_ptr": "*u8",
    "part_o_ptr": "*fp32",
    "part_lse_ptr": "*fp32",
    "lse_ptr": "*fp32",
}
_INT64_POINTERS = ("req_pool_indices_ptr", "mask_offsets_ptr")
_FLOATS = ("scale", "k_scale", "v_scale", "cap")

_SCORES = ("HAS_CAP", "HAS_SINKS")
_FLAGS: dict[str, dict[str, tuple[str, ...]]] = {
    "extend_attention": {
        "plain": ("HAS_PARTS",),
        "cap_sinks": ("HAS_PARTS", *_SCORES),
        "window_cap_sinks": ("HAS_WINDOW", *_SCORES),
        "custom_mask": ("HAS_MASK",),
        "window_both_ways": ("HAS_WINDOW",),
        "window_chunks": ("HAS_WINDOW", "HAS_CHUNKS"),
        "biases": ("HAS_PARTS",),
        "window_biases": ("HAS_WINDOW",),
    },
    "decode_attention": {
        "plain": ("HAS_GUESSES",),
        "cap_sinks": ("HAS_GUESSES", *_SCORES),
        "window_cap_sinks": ("HAS_GUESSES", "HAS_WINDOW", *_SCORES),
        "window_chunks": ("HAS_GUESSES", "HAS_WINDOW", "HAS_CHUNKS"),
        "biases": ("HAS_GUESSES",),
        "window_biases": ("HAS_GUESSES", "HAS_WINDOW"),
    },
    "prefill_attention": {"causal": ("CAUSAL",), "bidirectional": ()},
    "latent_prompt_attention": {"causal": ("CAUSAL", "CARRY_OUT"), "chunk": ("CARRY_IN", "CARRY_OUT")},
}
"""The flags that are recorded, those that cost most: draft tokens, prefixes in parts, a cap and sinks together, in
layers with a window and in those without."""

_BIASED = ("biases", "window_biases")
"""Flags of kernels of their own."""
_OF_SOME_HEADS = {
    "window_both_ways": ((256, 256),),
    **dict.fromkeys(("window_chunks", *_BIASED), ((128, 128),)),
}
"""Flags that only models with these heads have: images that see themselves both ways in layers with a window (Gemma 4),
windows that are chunks (Llama 4), biases by distance (Inkling)."""
GROUP = 8
"""Query heads a kv head, in every row: with 1 to 128 of them shared memory is the same, and none takes more registers
but 12, which takes up to 10 more and spills no more."""

# Flags, in the order of what they switch off.
_PREFIX = ("k_cache_ptr", "v_cache_ptr", "req_to_token_ptr", "req_pool_indices_ptr", "prefix_lens_ptr", "k_scale",
           "v_scale", "stride_kcs", "stride_kch", "stride_vcs", "stride_vch", "stride_rt")  # fmt: skip
_DECODE = FormRule(
    free=frozenset({"GROUP"}),
    at_most=frozenset({"HAS_CAP", "HAS_SINKS", "HAS_GUESSES"}),
    counts=frozenset({"num_heads", "num_head_tiles", "num_tokens", "window", "stride_rt"}),
    absent={
        "HAS_SINKS": ("sinks_ptr",),
        "HAS_WINDOW": ("window",),
        "HAS_GUESSES": ("prefix_lens_ptr", "num_tokens"),
    },
)
FORM_RULES = {
    "extend_attention.extend_kernel": FormRule(
        free=frozenset({"GROUP"}),
        at_most=frozenset({"HAS_PREFIX", "HAS_CAP", "HAS_SINKS", "HAS_PARTS"}),
        # Slots are loaded one by one: it does not matter how rows of the table lie.
        counts=frozenset({"num_seqs", "num_blocks", "num_kv_heads", "num_parts", "window", "stride_rt"}),
        absent={
            "HAS_PREFIX": _PREFIX,
            "HAS_PARTS": ("part_o_ptr", "part_lse_ptr", "num_parts"),
            "HAS_SINKS": ("sinks_ptr",),
            "HAS_MASK": ("mask_ptr", "mask_offsets_ptr"),
            "HAS_WINDOW": ("window",),
        },
    ),
    "decode_attention.decode_kernel": _DECODE,
    "decode_fp4.decode_fp4_kernel": _DECODE,
    "extend_fp4.extend_fp4_kernel": FormRule(
        free=frozenset({"GROUP"}),
        at_most=frozenset({"HAS_CAP", "HAS_SINKS"}),
        counts=frozenset({"num_seqs", "num_blocks", "num_kv_heads", "window", "stride_rt"}),
        absent={"HAS_SINKS": ("sinks_ptr",), "HAS_WINDOW": ("window",)},
    ),
    "extend_biased.extend_biased_kernel": FormRule(
        free=frozenset({"GROUP"}),
        at_most=frozenset({"HAS_PREFIX", "HAS_PARTS"}),
        counts=frozenset({"num_seqs", "num_blocks", "num_kv_heads", "num_parts", "window", "extent", "stride_rt"}),
        absent={
            "HAS_PREFIX": _PREFIX,
            "HAS_PARTS": ("part_o_ptr", "part_lse_ptr", "num_parts"),
            "HAS_WINDOW": ("window",),
        },
    ),
    "decode_biased.decode_biased_kernel": FormRule(
        free=frozenset({"GROUP"}),
        at_most=frozenset({"HAS_GUESSES"}),
        counts=frozenset({"num_heads", "num_head_tiles", "num_tokens", "window", "extent", "stride_rt"}),
        absent={"HAS_WINDOW": ("window",), "HAS_GUESSES": ("prefix_lens_ptr", "num_tokens")},
    ),
    "latent_decode.latent_decode_kernel": FormRule(
        at_most=frozenset({"HAS_GUESSES"}),
        counts=frozenset({"num_heads", "num_head_tiles", "num_tokens", "stride_rt"}),
        absent={"HAS_GUESSES": ("prefix_lens_ptr", "num_tokens")},
    ),
    "decode_attention.combine_kernel": FormRule(
        # Rows have a head dim that their columns do not divide, so that columns are masked.
        free=frozenset({"V_HEAD_DIM"}),
        at_most=frozenset({"HAS_SINKS", "HAS_LSE"}),
        counts=frozenset({"num_heads", "num_sinks", "stride_ob", "stride_oh"}),
        absent={"HAS_SINKS": ("sinks_ptr", "num_sinks"), "HAS_LSE": ("lse_ptr",)},
    ),
    "decode_attention.plan_kernel": FormRule(counts=frozenset({"num_seqs", "num_slots", "num_pieces"})),
    "latent_prompt.latent_prompt_kernel": FormRule(
        at_most=frozenset({"CARRY_OUT"}),
        counts=frozenset({"num_seqs", "num_blocks", "num_heads"}),
        absent={"CARRY_OUT": ("part_o_ptr", "part_lse_ptr")},
    ),
    "latent_prompt.gather_latents_kernel": FormRule(free=frozenset({"NOPE"}), counts=frozenset({"num_heads"})),
}


def variants(op: str, features: tuple[str, ...] = ()) -> Iterator[Variant]:
    """Variants of `op` for a GPU with `features` (they decide which preferred tiles come on top)."""
    for row in tiles.ROWS:
        if row.op != op:
            continue
        for rank, tile in enumerate(row.candidates(features)):
            for head_dims in row.head_dims:
                for kv_dtype in KV_DTYPES:
                    if tiles.KV_BYTES[kv_dtype] in row.kv_bytes:
                        yield from _tile_variants(op, head_dims, kv_dtype, tile, rank == 0)
    if op == "decode_attention":
        yield from _pieces(features)
    if op == "latent_prompt_attention":
        yield from _gathers()


def _pieces(features: tuple[str, ...]) -> Iterator[Variant]:
    """The kernels that cut the work of decoding into pieces, and those that put their results together."""
    plans: dict[tuple[int, int], tiles.AttentionTile] = {}
    values: dict[int, list[int]] = {SPREAD_COLS: []}
    for row in tiles.ROWS:
        if row.op == "decode_attention":
            plans |= {(tile["BLOCK_N"], tile["waves"]): tile for tile in row.candidates(features)}
            for _, v_head_dim in row.head_dims:
                for block in (SPREAD_COLS, triton.next_power_of_2(v_head_dim)):
                    values.setdefault(block, []).append(v_head_dim)
    for (block, waves), tile in sorted(plans.items()):
        yield _small(f"plan/{block}x{waves}", plan_kernel, {**plan_constants(tile, waves), "PDL": False})
    for block, head_dims in sorted(values.items()):
        shape = {"V_HEAD_DIM": max(head_dims, key=lambda dim: (dim % block != 0, dim)), **combine_blocks(block)}
        launch = {**shape, "HAS_SINKS": True, "HAS_LSE": True, "PDL": False, "num_warps": 4}
        yield _small(f"combine/{block}", combine_kernel, launch)


def _gathers() -> Iterator[Variant]:
    """The kernels that read the latents of a prefix from caches of each type."""
    for head_dim, rank in tiles.MLA_LATENTS:
        launch = gather_constants(rank, head_dim - rank)
        tile = {"num_warps": launch.pop("num_warps"), "num_stages": 3}
        constexprs = launch | {"NOPE": rank // 4}
        shape = "" if rank == tiles.MLA_LATENT[1] else f"{rank}/"
        for kv_dtype in ("bfloat16", "fp8_e4m3", "fp8_e5m2"):
            signature = {name: _type_of(name, kv_dtype, constexprs) for name in gather_latents_kernel.arg_names}
            signature |= {"cache_ptr": KV_DTYPES[kv_dtype], "slots_ptr": "*i64", "latent_ptr": "*bf16"}
            multiples = ("cache_ptr", "slots_ptr", "latent_ptr", "k_ptr", "slot_stride", "key_stride")
            yield Variant(
                "latent_prompt_attention",
                f"gather/{shape}{kv_dtype}",
                gather_latents_kernel,
                signature,
                constexprs,
                multiples,
                tile,
            )


def _small(key: str, fn: Any, launch: dict[str, Any]) -> Variant:
    tile = {"num_warps": launch["num_warps"], "num_stages": 3}
    constexprs = {name: value for name, value in launch.items() if name != "num_warps"}
    signature = {name: _type_of(name, "bfloat16", constexprs) for name in fn.arg_names}
    head_dim = constexprs.get("V_HEAD_DIM", 0)
    return Variant(
        "decode_attention", key, fn, signature, constexprs, _multiples(fn, signature, (head_dim, head_dim)), tile
    )


def _multiples(fn: Any, signature: dict[str, str], head_dims: tuple[int, int]) -> tuple[str, ...]:
    """Strides between heads are head dims; those between tokens and slots take an even number of heads."""
    ignored = set(fn.do_not_specialize) | set(fn.do_not_specialize_on_alignment)
    for name in ("stride_qh", "stride_kh", "stride_kch"):
        ignored |= {name} if head_dims[0] % 16 else set()
    for name in ("stride_vh", "stride_vch", "stride_oh"):
        ignored |= {name} if head_dims[1] % 16 else set()
    return tuple(
        name
        for name, kind in signature.items()
        if (kind.startswith("*") or name.startswith("stride")) and name not in ignored
    )


def _tile_variants(
    op: str, head_dims: tuple[int, int], kv_dtype: str, tile: tiles.AttentionTile, default: bool
) -> Iterator[Variant]:
    flags = list(_FLAGS[op].items())
    if _kernel(op, head_dims, kv_dtype) is latent_decode_kernel:  # in which the format of the cache is a constant
        flags = flags[:1]
    elif not default and op != "latent_prompt_attention":  # what a launch carries over changes shared memory
        # What a launch steps down to is smaller in every respect: without features it is on record, and e5m2 costs what
        # e4m3 costs. This halves the time to compile the ledger.
        # A kernel of its own counts for itself.
        others = [(name, names) for name, names in flags if name == _BIASED[0]]
        flags = [] if kv_dtype == "fp8_e5m2" else [*flags[:1], *others]
    for name, names in flags:
        # No call site of this server passes a mask: what it costs is on record, but decides about no tile.
        if name == "custom_mask" and kv_dtype != "bfloat16":
            continue
        if name in _BIASED and kv_dtype == "fp4_e2m1":
            continue
        if head_dims in _OF_SOME_HEADS.get(name, (head_dims,)):
            yield describe(op, head_dims, kv_dtype, tile, name, names, default and name != "custom_mask")


def _kernel(op: str, head_dims: tuple[int, int], kv_dtype: str, flags_name: str = "") -> Any:
    if flags_name in _BIASED:
        return decode_biased_kernel if op == "decode_attention" else extend_biased_kernel
    if kv_dtype == "fp4_e2m1":
        return decode_fp4_kernel if op == "decode_attention" else extend_fp4_kernel
    if op == "decode_attention":
        return latent_decode_kernel if head_dims in tiles.MLA_LATENTS else decode_kernel
    return latent_prompt_kernel if op == "latent_prompt_attention" else extend_kernel


def describe(
    op: str,
    head_dims: tuple[int, int],
    kv_dtype: str,
    tile: tiles.AttentionTile,
    flags_name: str,
    flags: tuple[str, ...],
    default: bool = True,
) -> Variant:
    """The launch of `op` with one tile, in the table or not (negative tests, searches for new tiles)."""
    fn = _kernel(op, head_dims, kv_dtype, flags_name)
    constexprs = _shape_constexprs(head_dims, kv_dtype, tile, "BLOCK_M" if "BLOCK_M" in tile else "BLOCK_H")
    constexprs = {name: value for name, value in constexprs.items() if name in fn.arg_names}
    if "PDL" in fn.arg_names:
        constexprs["PDL"] = False
    if head_dims in WHOLE:
        flags = tuple(flag for flag in flags if flag != "HAS_PARTS")
    for name in fn.arg_names:
        if name.startswith(("HAS_", "CARRY_")) or name == "CAUSAL":
            constexprs[name] = name in flags
    if op == "extend_attention":
        if "CAUSAL" in fn.arg_names:
            constexprs["CAUSAL"] = flags_name != "window_both_ways"
        constexprs |= {"HAS_PREFIX": True} if "HAS_PREFIX" in fn.arg_names else {}
    signature = {name: _type_of(name, kv_dtype, constexprs) for name in fn.arg_names}
    divisible = _multiples(fn, signature, head_dims)
    shape = f"{head_dims[0]}x{head_dims[1]}"
    key = f"{shape}/bfloat16/{kv_dtype}/{flags_name}"
    return Variant(op, key, fn, signature, constexprs, divisible, tile, head_dims, kv_dtype, default)


def _shape_constexprs(
    head_dims: tuple[int, int], kv_dtype: str, tile: tiles.AttentionTile, rows: str
) -> dict[str, Any]:
    head_dim, v_head_dim = head_dims
    block_d, block_dpe = split_head_dim(head_dim)
    latent = head_dims in tiles.MLA_LATENTS
    shape: dict[str, Any] = {
        "GROUP": 128 if latent else GROUP,
        "HEAD_DIM": head_dim,
        "V_HEAD_DIM": v_head_dim,
        "BLOCK_D": block_d,
        "BLOCK_DPE": block_dpe,
        "BLOCK_DV": triton.next_power_of_2(v_head_dim),
        "BLOCK_N": tile["BLOCK_N"],
        "RANK": v_head_dim,
        "ROPE": head_dim - v_head_dim,
        "FP8": tiles.KV_BYTES[kv_dtype] == 1,
        "E5M2": kv_dtype == "fp8_e5m2",
        "BLOCK_G": group_block(head_dim),
        "BLOCK_GV": group_block(v_head_dim),
    }
    return shape | {rows: tile[rows], "V_IN_K": latent}


def _type_of(name: str, kv_dtype: str, constexprs: dict[str, Any]) -> str:
    if name in constexprs:
        return "constexpr"
    if name in _POINTERS:
        return _POINTERS[name]
    if name in _INT64_POINTERS:
        return "*i64"
    if name in ("k_scales_ptr", "v_scales_ptr"):
        return "*u8"
    if name in ("k_cache_ptr", "v_cache_ptr"):
        return KV_DTYPES[kv_dtype]
    if name == "cache_ptr":  # float8 in pairs
        return "*bf16" if kv_dtype == "bfloat16" else "*i16"
    if name in ("q_ptr", "k_ptr", "v_ptr", "o_ptr", "bias_ptr"):
        return "*bf16"
    if name.endswith("_ptr"):
        return "*i32"
    return "fp32" if name in _FLOATS else "i32"
