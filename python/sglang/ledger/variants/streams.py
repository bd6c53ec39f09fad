"""Launch variants of gated residual streams, n-gram embeddings, short convolutions and attention to selected blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from sglang.ledger.form_rule import FormRule
from sglang.ledger.variant import Variant, describe
from sglang.ledger.variants.sparse import merges, tile_variants
from sglang.srt.blocks.engram.spec import SCALE_GROUP
from sglang.srt.blocks.gated_streams.kernels import gated_streams
from sglang.srt.blocks.ngram_embedding.kernels import ngram_embedding
from sglang.srt.blocks.pooled_sparse.kernels import selected_blocks
from sglang.srt.blocks.short_convolution.kernels import short_convolution
from sglang.srt.kernels import tiles
from sglang.srt.layers.triton_ops import keep_last
from sglang.srt.layers.triton_ops.norm import row_launch

OPS = ("gated_streams", "ngram_embedding", "short_convolution", "selected_block_attention")
ENGRAM_DIM, ENGRAM_HIDDEN, ENGRAM_LONGEST = 256, 5120, 4
"""Columns of a row of DeepSeek-V4.1's tables, its hidden size, and the tokens of its longest n-grams."""

STREAMS, HIDDEN, RANK = 4, 2560, 320
LONGEST, ROW_DIM, TAPS = 3, 160, 4
USUAL_GUESSES = 3
"""Draft tokens of a step where no flag says how many."""
BLOCK_TOKENS = 4
"""Sizes of Qwen3.8-Flash-Next."""

_PLACES = frozenset({"num_heads", "group", "num_kv_heads", "num_head_tiles", "num_splits", "stride_blocks"})
_SELECTED = frozenset({"blocks_ptr", "counts_ptr", "tails_ptr", "tail_counts_ptr"})
FORM_RULES = {
    "gated_streams.place_and_norm_kernel": FormRule(at_most=frozenset({"HAS_OUT"})),
    "gated_streams.bend_kernel": FormRule(counts=frozenset({"placed", "product_stride", "rank"})),
    "ngram_embedding.ngram_rows_kernel": FormRule(
        counts=frozenset({"heads", "first_head", "per_ngram", "end_token", "fill", "sizes", "offsets"}),
        absent={"SCALED": ("scale",)},
    ),
    "selected_blocks.selected_block_kernel": FormRule(counts=_PLACES | _SELECTED),
}


def variants(op: str, features: tuple[str, ...] = ()) -> Iterator[Variant]:
    """Every launch of `op` over the sizes of the published model. `features` decide which preferred tiles come on
    top."""
    if op == "selected_block_attention":
        yield from _attention(features)
    else:
        yield from {"gated_streams": _streams, "ngram_embedding": _ngrams, "short_convolution": _convolutions}[op]()


_POINTERS = {
    **dict.fromkeys(("streams", "out", "normed", "products", "low", "gates", "values", "rows"), "*bf16"),
    **dict.fromkeys(("placement", "key_weight", "query_weight", "conv_weight", "scale"), "*fp32"),
    **dict.fromkeys(("ids", "slots", "positions", "firsts", "stops", "multipliers", "sizes", "offsets"), "*i64"),
    **dict.fromkeys(("eps", "root"), "fp32"),
}


def _of(
    op: str, key: str, fn: Any, constants: dict[str, Any], launch: Mapping[str, int], divisible: tuple[str, ...] = (),
    **others: str,
) -> Variant:  # fmt: skip
    """Returns a variant of the kernel; `others`: types of parameters that are not those of every kernel here."""
    known = _POINTERS | others
    types = {name: known.get(name, "i32") for name in fn.arg_names if not name.isupper()}
    return describe(op, key, fn, types, constants, launch, divisible)


def _streams() -> Iterator[Variant]:
    op, streams = "gated_streams", {"STREAMS": STREAMS}
    yield _of(
        op, "place", gated_streams.place_and_norm_kernel, streams | {"HAS_OUT": True}, row_launch(HIDDEN),
        ("out_stride", "size"), weight="*fp32",
    )  # fmt: skip
    yield _of(op, "bend", gated_streams.bend_kernel, streams, gated_streams.bend_launch(RANK + STREAMS), ())
    kernel = gated_streams.mix_streams_of_gates_kernel
    yield _of(op, "mix", kernel, streams, gated_streams.MIX_LAUNCH, ("size", "gate_stride"))


def _ngrams() -> Iterator[Variant]:
    op, module = "ngram_embedding", ngram_embedding
    for table in ("*bf16", "*fp8e4nv"):
        yield _of(
            op, f"rows/{table.removeprefix('*')}", module.ngram_rows_kernel,
            {"LONGEST": LONGEST, "SCALED": table == "*fp8e4nv", "GROUP": 0}, module.rows_launch(ROW_DIM), ("dim",),
            table=table, kept="*i32",
        )  # fmt: skip
    yield _of(
        op, "rows/grouped", module.ngram_rows_kernel, {"LONGEST": ENGRAM_LONGEST, "SCALED": True, "GROUP": SCALE_GROUP},
        module.rows_launch(ENGRAM_DIM), ("dim",), table="*fp8e4nv", scale="*u8", kept="*i32",
    )  # fmt: skip
    yield _of(
        op, f"gate/{ENGRAM_HIDDEN}", module.gate_values_kernel, {"STREAMS": STREAMS}, row_launch(ENGRAM_HIDDEN),
        ("product_stride", "size"),
    )  # fmt: skip
    yield _of(
        op, "gate", module.gate_values_kernel, {"STREAMS": STREAMS}, row_launch(HIDDEN), ("product_stride", "size")
    )
    yield _of(
        op, "convolve", module.convolve_values_kernel, {"TAPS": TAPS, "DILATION": LONGEST}, module.LAUNCH, ("width",),
        kept="*bf16", weight="*bf16",
    )  # fmt: skip
    kernel, rows = keep_last.keep_last_kernel, {"SIZE": (TAPS - 1) * LONGEST}
    yield _of(op, "keep/rows", kernel, rows, keep_last.LAUNCH, ("width",), new="*bf16", kept="*bf16")
    for longest in (LONGEST, ENGRAM_LONGEST):
        ids = _of(
            op, f"keep/ids/{longest}", kernel, {"SIZE": longest - 1}, keep_last.ONE_VALUE, new="*i64", kept="*i32"
        )
        yield replace(ids, ones=("width",))


def _convolutions() -> Iterator[Variant]:
    """Of a model, and of a draft whose rows are computed again."""
    op, launch = "short_convolution", short_convolution.LAUNCH
    for name, kept in (("", TAPS - 1), ("/drafts", TAPS - 1 + USUAL_GUESSES)):
        yield _of(
            op, f"convolve{name}", short_convolution.convolve_kernel, {"TAPS": TAPS, "KEPT": kept}, launch,
            ("width", "out_stride"), kept="*bf16", weight="*bf16",
        )  # fmt: skip
        kernel, rows = keep_last.keep_last_kernel, {"SIZE": kept}
        yield _of(op, f"keep{name}", kernel, rows, keep_last.LAUNCH, ("width",), new="*bf16", kept="*bf16")


def _attention(features: tuple[str, ...]) -> Iterator[Variant]:
    op, kernel = "selected_block_attention", selected_blocks.selected_block_kernel
    strides = tuple(name for name in kernel.arg_names if name.startswith("stride_") and name != "stride_blocks")
    for row in tiles.ROWS:
        for tile in row.candidates(features) if row.op == op else ():
            for dim, v_dim in row.head_dims:
                types = {name: "i32" for name in kernel.arg_names if not name.isupper()}
                types |= dict.fromkeys(("q_ptr", "o_ptr", "k_ptr", "v_ptr"), "*bf16")
                types |= dict.fromkeys(("part_o_ptr", "part_lse_ptr"), "*fp32") | dict.fromkeys(_SELECTED, "*i32")
                types["scale"] = "fp32"
                constants = {"DIM": dim, "BLOCK": BLOCK_TOKENS}
                yield tile_variants(
                    op, f"{dim}x{v_dim}/bfloat16/bfloat16/plain", kernel, types, constants, tile, strides
                )
    for dim in sorted({dims[0] for row in tiles.ROWS if row.op == op for dims in row.head_dims}):
        yield from merges(op, f"merge/{dim}", dim, False)
