"""Launch variants of the expert kernels, described for the ledger.

Each scheme with its tiles of `tiles.py` and one set of sizes. Of the sizes a compiler sees only whether blocks divide
them ("even", "ragged"): those that no block divides are GPT-OSS's, in every format it comes in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from sglang.ledger.form_rule import FormRule
from sglang.ledger.shipped_products import shipped_products
from sglang.ledger.variant import Variant, describe
from sglang.ledger.variants.expert_products import (
    GROUPING,
    ROUTING,
    SIZES,
    STRIDES,
    ExpertLaunch,
    grouped,
    product_variant_of,
)
from sglang.ledger.variants.quantized import (
    COLUMNS,
    EVEN,
    LONE_SCALES,
    PRODUCT_ABSENT,
    RAGGED,
    SCALE_STRIDES,
    products,
    recorded_schemes,
)
from sglang.srt.configs.activation import GPT_OSS_SWIGLU
from sglang.srt.configs.quant_scheme import SCHEMES
from sglang.srt.kernels.scaled_product import product_of
from sglang.srt.layers.moe.fused_moe_triton import align, kernels, kernels_few, kernels_zero_points
from sglang.srt.layers.moe.fused_moe_triton.fused_moe import COMBINE_BLOCK
from sglang.srt.layers.moe.fused_moe_triton.tiles import PAIR_TILES, early_tiles, last_resort, pair_cut, tile_rows
from sglang.srt.layers.triton_ops.activation import gate_constants
from sglang.srt.layers.triton_ops.streamed_dot import pair_launch

OPS = ("fused_moe",)

MAX_EXPERTS = 512
MAX_CHOICES = 24
"""The limit of experts for a token, a shared expert among them."""

GATE_NUMBERS = ("ALPHA", "CUBIC", "OFFSET", "LIMIT")
_GROUPED = FormRule(
    # GROUP_M orders programs. What an activation computes it does when the operands of the products are no longer held.
    free=frozenset({"GROUP_M", *GATE_NUMBERS}),
    at_most=frozenset({"HAS_GATE"}),
    at_least=frozenset({"EVEN_K"}),
    counts=frozenset({"num_pairs", "top_k"}),
    counts_where=LONE_SCALES,
    absent=PRODUCT_ABSENT | {"X_FACTOR": ("x_factor",)},
)
_PAIRS = FormRule(
    free=frozenset({"TOP_K", "STEPS", *GATE_NUMBERS}),
    at_most=frozenset({"HAS_GATE", "EARLY"}),
    counts=frozenset({"top_k", *SCALE_STRIDES}),
    absent=PRODUCT_ABSENT,
)
FORM_RULES = {
    "kernels.gate_up_kernel": _GROUPED,
    "kernels.down_kernel": _GROUPED,
    "kernels_few.gate_up_pairs_kernel": _PAIRS,
    "kernels_few.down_sum_kernel": _PAIRS,
    "kernels_zero_points.gate_up_kernel": _GROUPED,
    "kernels_zero_points.down_kernel": _GROUPED,
    "kernels_zero_points.gate_up_pairs_kernel": _PAIRS,
    "kernels_zero_points.down_sum_kernel": _PAIRS,
    "kernels.combine_kernel": FormRule(at_most=frozenset({"TOP_K"})),
    "align.align_small_kernel": FormRule(free=frozenset({"BLOCK_M"}), at_most=frozenset({"EXPERTS"})),
    "align.align_count_kernel": FormRule(at_most=frozenset({"EXPERTS"})),
    "align.align_offsets_kernel": FormRule(free=frozenset({"BLOCK_M"}), at_most=frozenset({"EXPERTS"})),
}


def variants(op: str, features: tuple[str, ...] = ()) -> Iterator[Variant]:
    """Every launch of the experts with weights of any scheme, and with GPT-OSS's biases. Of launches that differ in a
    number of steps alone, which costs the same, the first stands for all."""
    assert op == "fused_moe"
    first: dict[tuple[str, tuple[Any, ...]], Variant] = {}
    for variant in _launches(op, features):
        first.setdefault((variant.key, tuple(variant.tile.items())), variant)
    yield from first.values()


def _launches(op: str, features: tuple[str, ...]) -> Iterator[Variant]:
    for scheme in (None, *recorded_schemes()):
        for product, tail in products(scheme, features):
            yield from _scheme_variants(ExpertLaunch(scheme, product, tail=tail), features)
            if scheme is not None and scheme.element == "int4":
                zero_points = ExpertLaunch(scheme, product, tail=tail, zero_points=True)
                # The rows without them decide about tiles.
                yield from (replace(variant, form_only=True) for variant in _scheme_variants(zero_points, features))
    yield from _gpt_oss(features)
    types = {"pair_out": "*bf16", "out": "*bf16", "num_cols": "i32"} | ROUTING
    launch = {"BLOCK": COMBINE_BLOCK, "num_warps": 4}
    yield describe(op, "combine", kernels.combine_kernel, types, {"TOP_K": MAX_CHOICES}, launch, ("num_cols",))
    yield from (product_variant_of(product, features) for product in shipped_products(features))
    yield from _without_biases(features)
    yield from _alignment()


def _scheme_variants(experts: ExpertLaunch, features: Collection[str]) -> Iterator[Variant]:
    """Hidden sizes are multiples of what a block takes, but GPT-OSS's; a rank's share of an expert need not be."""
    ragged = replace(experts, intermediate=RAGGED)
    for row in tile_rows(experts.product.tile_kind, features):
        yield grouped("gate_up", experts, row.gate_up, features)
        yield grouped("down", experts, row.down, features)
        yield replace(grouped("down", ragged, row.down, features), form_only=True)
    yield from _last_resort(experts, features)
    last = replace(grouped("down", ragged, last_resort(experts.product.tile_kind).down, features), default=False)
    yield replace(last, form_only=True)
    if experts.product.kind == "mx":
        yield from _odd_scales(experts, features)
    yield from _few(experts, (EVEN, 2688, 2816, 3584), COLUMNS)


def _odd_scales(experts: ExpertLaunch, features: Collection[str]) -> Iterator[Variant]:
    """Variants for hidden sizes whose rows of scales do not lie in multiples of 16: Nemotron-3-Nano's, and Gemma 4's
    for most."""
    nemotron = replace(experts, hidden=2688, tail=f"{experts.tail}/odd_scales")
    for row in tile_rows(experts.product.tile_kind, features):
        yield replace(grouped("gate_up", nemotron, row.gate_up, features), form_only=True)
    last = grouped("gate_up", nemotron, last_resort(experts.product.tile_kind).gate_up, features)
    yield replace(last, default=False, form_only=True)


def _last_resort(experts: ExpertLaunch, features: Collection[str]) -> Iterator[Variant]:
    last = last_resort(experts.product.tile_kind)
    yield replace(grouped("gate_up", experts, last.gate_up, features), default=False)
    yield replace(grouped("down", experts, last.down, features), default=False)


def _gpt_oss(features: Collection[str]) -> Iterator[Variant]:
    """Sizes that no block divides: GPT-OSS's, with its biases, in every format it comes in."""
    for name in (None, "mxfp4", "mxfp4_mxfp8"):
        scheme = SCHEMES[name] if name else None
        product = product_of(scheme, features)
        experts = ExpertLaunch(scheme, product, 2880, 2880, 4, GPT_OSS_SWIGLU, bias=True)
        for row in tile_rows(product.tile_kind, features):
            yield grouped("gate_up", experts, row.gate_up, features)
            yield grouped("down", experts, row.down, features)
        yield from (replace(variant, form_only=True) for variant in _last_resort(experts, features))
        yield from _few(experts, (2880,), (2880, 768, 384))
    # Shares of 16-bit experts, which no block divides.
    half = ExpertLaunch(None, product_of(None, features), 2880, 1440, 4, GPT_OSS_SWIGLU, bias=True)
    for row in tile_rows("plain", features):
        yield replace(grouped("down", half, row.down, features), form_only=True)


def _without_biases(features: Collection[str]) -> Iterator[Variant]:
    """The tiles of files for experts with biases, for others: a file serves every layer with as many experts of its
    width (`config_files.find`), as GPT-OSS's for 384 columns do shards of Qwen3's and MiniMax-M3's experts."""
    for product in shipped_products(features):
        if product.bias:
            other = replace(product, bias=False, hidden=EVEN)
            yield replace(product_variant_of(other, features), form_only=True)


def _few(experts: ExpertLaunch, hidden_sizes: Collection[int], shares: Collection[int]) -> Iterator[Variant]:
    """One row for each way of cutting the columns: hidden sizes those of the first matrix, shares of the second."""
    up_tile, down_tile = PAIR_TILES[experts.product.pair_kind]
    few = kernels_zero_points if experts.zero_points else kernels_few
    types = SIZES | STRIDES | ROUTING | {"top_k": "i32", "x_stride": "i32"}
    types |= {"x": "*bf16", "inter": "*bf16", "out": "*bf16"}
    group = experts.scheme.group[1] if experts.scheme is not None and experts.scheme.group[0] == 1 else 1
    for hidden in hidden_sizes:
        launch = pair_launch(experts.product, pair_cut(experts.product, up_tile, experts.intermediate, hidden), hidden)
        pointers, constants = types | experts.matrix_types("w13", True), gate_constants(experts.activation)
        yield _pair_variants("gate_up_pairs", few.gate_up_pairs_kernel, pointers, launch, constants, experts, hidden)
    for share in shares:
        if group and share % group:
            continue  # no rank's share cuts a group
        launch = pair_launch(experts.product, pair_cut(experts.product, down_tile, experts.hidden, share), share)
        pointers = types | experts.matrix_types("w2", True)
        steps = {"TOP_K": experts.top_k, "STEPS": -(-share // launch["COLS"])}
        steps["EARLY"] = early_tiles(experts.product.kind, launch["COLS"], MAX_CHOICES * steps["STEPS"])
        yield _pair_variants("down_sum", few.down_sum_kernel, pointers, launch, steps, experts, share)


def _pair_variants(
    kernel: str,
    fn: Any,
    types: dict[str, str],
    launch: dict[str, Any],
    constants: dict[str, Any],
    experts: ExpertLaunch,
    depth: int,
) -> Variant:
    tile = {name: launch[name] for name in ("BLOCK_N", "COLS", "UNROLL", "num_warps")}
    constants = constants | experts.flags | {name: value for name, value in launch.items() if name not in tile}
    # Rows of `depth` / 8 words of eight columns each: a stride that 16 divides only where 128 divides the columns.
    words = experts.product.pair_kind == "packed" and depth % 128 != 0
    multiples = (name for name in experts.multiples(depth) if name in fn.arg_names)
    key = f"{kernel}/{experts.name}" + ("" if launch["EVEN_K"] else "/ragged") + ("/words" if words else "")
    key += "/bias" if experts.bias else ""
    aligned = tuple(name for name in multiples if not (words and name == "w_stride"))
    return describe("fused_moe", key, fn, types, constants, tile, aligned)


def _alignment() -> Iterator[Variant]:
    """The kernels that sort the choices of tokens by expert."""
    types = GROUPING | {"topk_ids": "*i32", "cursors": "*i32", "counts": "*i32", "num_places": "i32"}
    launches = {
        align.align_small_kernel: {"EXPERTS": MAX_EXPERTS, "BLOCK_M": 16, "CHUNK": align.CHUNK, "num_warps": 16},
        align.align_count_kernel: {"EXPERTS": MAX_EXPERTS, "CHUNK": align.CHUNK, "num_warps": 8},
        align.align_offsets_kernel: {"EXPERTS": MAX_EXPERTS, "BLOCK_M": 64, "num_warps": 8},
        align.align_scatter_kernel: {"CHUNK": align.CHUNK, "num_warps": 8},
    }
    for fn, launch in launches.items():
        yield describe("fused_moe", fn.fn.__name__.removesuffix("_kernel"), fn, types, {}, launch)
