"""Launch variants of the products with quantized weights and of activation quantization, described for the ledger."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from sglang.ledger.form_rule import FormRule
from sglang.ledger.variant import Variant, describe
from sglang.ledger.variants.elementwise import HIDDEN_SIZES
from sglang.srt.configs.quant_scheme import HEAD_SCHEMES, SCHEMES, Scheme
from sglang.srt.kernels.ledger_file import DEQUANTIZED_TAIL, SAME_LAUNCHES
from sglang.srt.kernels.scaled_product import ScaledProduct, product_of
from sglang.srt.layers.quantization.activations import RowForm
from sglang.srt.layers.triton_ops import norm_quantize, quant_linear, quantize
from sglang.srt.layers.triton_ops.linear_tiles import (
    MAX_SPLITS,
    NARROW_KINDS,
    NARROW_ROWS,
    SPLIT_ROWS,
    ScaledTile,
    early_steps,
    few_cut,
    few_tile,
    last_resort,
    tile_rows,
)
from sglang.srt.layers.triton_ops.streamed_dot import pair_launch

OPS = ("linear", "quantize_activation")

_ELEMENTS = {"e4m3": "*fp8e4nv", "int8": "*i8", "int4": "*i32", "e2m1": "*u8"}
_SCALES = {"float32": "*fp32", "bfloat16": "*bf16", "e8m0": "*u8", "e4m3": "*fp8e4nv"}
_X_SCALES = {"mxfp8": "*u8", "nvfp4": "*fp8e4nv"}
_STRIDES = dict.fromkeys(("x_stride", "xs_stride", "w_stride", "ws_stride"), "i32")
_ROWS = 1024
ROW_SIZES = tuple(1 << power for power in range(6, 17))
"""The sizes of activations that are quantized row by row: from the smallest share of an expert on."""
ODD = 1368
"""Columns of a share that 16 does not divide: of DeepSeek-V2-Lite's and GLM-4.5-Air's MLP on eight ranks."""
ODD_SHARES = (ODD, 264)
"""Columns of shares that 16 does not divide; 264 are those of Gemma 4 with 26 billion parameters."""
ODD_BYTES = 3696
"""Columns of a share that 16 divides, and whose bytes of packed four-bit elements it does not: Qwen2.5-72B on eight."""
COLUMNS = (1024, 1536, 768, 384, 192, 128, 96, 64, 11_552)
"""Columns of weights, by the largest power of two that divides them: what the tiles of few rows are cut by."""
EVEN = 4096
RAGGED = 11_552
"""Columns that no block divides, and whose scales (one for 32 or 16) do not lie in multiples of 16. Products on record
with these stand for those that blocks divide: they are spared the masks."""

SCALE_STRIDES = ("xs_stride", "ws_stride", "ws_expert_stride")
LONE_SCALES = {f"KIND={kind}": SCALE_STRIDES for kind in ("scaled", "group128", "planes")}
"""These load each scale by itself; "mx" loads rows of them, and through shared memory where they lie well."""
PRODUCT_ABSENT = {
    "KIND=plain": ("x_scale", "xs_stride", "w_scale", "ws_stride", "ws_expert_stride"),
    "KIND=planes": ("x_scale", "xs_stride"),
    "HAS_FACTOR": ("w_factor",),
    "HAS_BIAS": ("bias",),
}
FORM_RULES = {
    "quant_linear.tiles_kernel": FormRule(
        # GROUP_M orders programs.
        free=frozenset({"GROUP_M"}),
        at_most=frozenset({"SPLITS", "HAS_BIAS"}),
        at_least=frozenset({"EVEN_K"}),
        counts=frozenset({"T", "K"}),
        # With the scales of "mx" the compiler also arranges what it stores by N's alignment, through shared memory.
        counts_where={condition: (*names, "N") for condition, names in LONE_SCALES.items()},
        absent=PRODUCT_ABSENT | {"SPLITS": ("parts", "arrivals"), "HAS_X_FACTOR": ("x_factor",)},
    ),
    "quant_linear.few_rows_kernel": FormRule(
        at_most=frozenset({"HAS_BIAS", "EARLY"}),
        counts=frozenset({"N", "K", "ws_stride"}),
        absent=PRODUCT_ABSENT,
    ),
    "norm_quantize.add_rmsnorm_quantize_kernel": FormRule(counts=frozenset({"num_groups"})),
    "quantize.group_kernel": FormRule(
        counts=frozenset({"num_groups", "num_pairs"}),
        absent={"KIND=group128": ("factor",), "KIND=mxfp8": ("factor",)},
    ),
}


def variants(op: str, features: tuple[str, ...] = ()) -> Iterator[Variant]:
    """Every scheme as GPUs with these features compute it."""
    if op == "linear":
        for scheme in recorded_schemes():
            for product, tail in products(scheme, features):
                yield from _linear(scheme, product, tail, features)
    else:
        yield from _quantize()
        yield from _norm_quantize()


def recorded_schemes() -> tuple[Scheme, ...]:
    """Returns the schemes that have rows of their own."""
    return tuple(scheme for name, scheme in SCHEMES.items() if name not in SAME_LAUNCHES)


_HEADS = frozenset(SAME_LAUNCHES.get(name, name) for name in HEAD_SCHEMES)


def _outputs(scheme: Scheme, product: ScaledProduct) -> Iterator[tuple[str, str]]:
    """Types of what a product writes, and what they add to the rows' keys: logits are fp32."""
    yield "*bf16", ""
    if scheme.name in _HEADS and product.activation is None:
        yield "*fp32", "/fp32"


def products(scheme: Scheme | None, features: Collection[str]) -> Iterator[tuple[ScaledProduct, str]]:
    """Yields the product by which GPUs with these features multiply a scheme, and the end of its rows' keys. Where they
    have packed instructions, the product without them follows: other GPUs are judged by these rows."""
    native = product_of(scheme, features)
    yield native, ""
    if product_of(scheme, ()).kind != native.kind:
        yield product_of(scheme, ()), DEQUANTIZED_TAIL


def _linear(scheme: Scheme, product: ScaledProduct, tail: str, features: Collection[str]) -> Iterator[Variant]:
    smallest = 0.0
    for row in tile_rows(product.kind, features):
        # Where K may be split: the split variant holds the sum besides.
        splits = MAX_SPLITS if _may_split(product.kind, features, smallest) else 1
        for out, end in _outputs(scheme, product):
            yield from _tiles(scheme, product, tail, row.tile, splits, features, out, end)
        smallest = row.max_rows
    for out, end in _outputs(scheme, product):
        for variant in _tiles(scheme, product, tail, last_resort(product.kind), MAX_SPLITS, features, out, end):
            yield replace(variant, default=False)
        yield from _few(scheme, product, tail, out, end)


def _few(scheme: Scheme, product: ScaledProduct, tail: str, out: str, end: str) -> Iterator[Variant]:
    for cols in COLUMNS:
        if scheme.group[1] and cols % scheme.group[1] and scheme.group[0] == 1:
            continue  # no checkpoint cuts a row's group
        launch = pair_launch(product, few_cut(product, scheme.bits, _ROWS, cols), cols)
        tile = {name: launch[name] for name in ("BLOCK_N", "COLS", "UNROLL", "num_warps")}
        constants = {name: value for name, value in launch.items() if name not in tile} | _flags(scheme)
        maximum = early_steps(few_tile(product, scheme.bits), launch["COLS"])
        constants |= {"EARLY": maximum}
        types = {"x": "*bf16", "out": out, "N": "i32", "K": "i32", **_weight_types(scheme, product, True)}
        types = {
            name: kind for name, kind in (types | _STRIDES).items() if name in quant_linear.few_rows_kernel.arg_names
        }
        words = product.pair_kind == "packed" and cols % 128 != 0
        key = f"few/{scheme.name}{tail}" + ("" if launch["EVEN_K"] else "/ragged") + ("/words" if words else "") + end
        multiples = tuple(
            name for name in _multiples(scheme, product, types, cols) if not (words and name == "w_stride")
        )
        yield describe("linear", key, quant_linear.few_rows_kernel, types, constants, tile, multiples)
        if scheme.group[1] == 0 and not launch["EVEN_K"]:
            odd = tuple(name for name in multiples if name not in ("x_stride", "w_stride"))
            row = describe("linear", f"{key}/odd", quant_linear.few_rows_kernel, types, constants, tile, odd)
            yield replace(row, form_only=True)


def _tiles(
    scheme: Scheme,
    product: ScaledProduct,
    tail: str,
    tile: ScaledTile,
    splits: int,
    features: Collection[str],
    out: str,
    end: str,
) -> Iterator[Variant]:
    """Yields the variants of a tile with a bias and with columns that no block divides; for "mx" also with scales that
    lie in multiples of 16."""
    kind = product.activation
    data = "*bf16" if kind is None else "*u8" if kind == "nvfp4" else "*i8" if scheme.element == "int8" else "*fp8e4nv"
    factor = kind == "nvfp4"
    types = {"x": data, "x_scale": _X_SCALES.get(kind or "", "*fp32" if kind else "*bf16"), "out": out}
    types |= {"x_factor": "*fp32" if factor else "*bf16", "parts": "*fp32" if splits > 1 else "*bf16"}
    types |= {"arrivals": "*i32", **dict.fromkeys(("T", "N", "K", "chunk"), "i32"), **_STRIDES}
    types |= _weight_types(scheme, product, False)
    columns = [EVEN, RAGGED] if product.kind == "mx" else [RAGGED]
    columns += [ODD] if scheme.group[1] == 0 else [ODD_BYTES] if product.activation == "nvfp4" else []
    for cols in columns:
        launch = quant_linear.tile_launch(product, tile, cols, splits, features)
        constants = {name: value for name, value in launch.items() if name not in (*tile, "chunk")} | _flags(scheme)
        constants |= {"HAS_X_FACTOR": factor}
        key = f"tiles/{scheme.name}{tail}" + ("/split" if splits > 1 else "")
        odd = cols in (ODD, ODD_BYTES)
        key += ("/even" if cols == EVEN else "/odd" if odd else "") + end
        multiples = _multiples(scheme, product, types, cols)
        if odd:
            multiples = tuple(name for name in multiples if name not in ("x_stride", "w_stride"))
        row = describe("linear", key, quant_linear.tiles_kernel, types, constants, tile, multiples)
        yield replace(row, form_only=odd)
        if product.kind == "mx" and cols == RAGGED:
            # Rows of Nemotron-3-Nano on eight ranks: 16 does not divide them.
            aligned = tuple(name for name in multiples if name != "N")
            odd_rows = f"{key}/odd_rows"
            row = describe("linear", odd_rows, quant_linear.tiles_kernel, types, constants, tile, aligned)
            yield replace(row, form_only=True)


def _weight_types(scheme: Scheme, product: ScaledProduct, words: bool) -> dict[str, str]:
    in_words = scheme.bits == 4 and (words or product.kind == "planes")
    return {
        "w": "*i32" if in_words else _ELEMENTS[scheme.element],
        "w_scale": _SCALES[scheme.scale],
        "w_factor": "*fp32" if scheme.global_scale else "*bf16",
        "bias": "*bf16",
    }


def _flags(scheme: Scheme) -> dict[str, Any]:
    return {"HAS_FACTOR": scheme.global_scale, "HAS_BIAS": True}


def _multiples(scheme: Scheme, product: ScaledProduct, types: dict[str, str], cols: int) -> tuple[str, ...]:
    group = scheme.group[1]
    # Scales of rows and tensors have strides of 1 and 0.
    aligned = group != 0 and (product.kind != "mx" or cols // group % 16 == 0)
    names = ("N", "K", "chunk", "x_stride", "w_stride", *(("xs_stride", "ws_stride") if aligned else ()))
    return tuple(name for name in names if name in types)


def _quantize() -> Iterator[Variant]:
    op, sizes = "quantize_activation", ("row_stride", "size")
    types = {"x": "*bf16", "scale": "*fp32", "row_stride": "i32", "size": "i32", "limit": "fp32"}
    for element, data in (("e4m3", "*fp8e4nv"), ("int8", "*i8")):
        for launch in {v["BLOCK"]: v for v in map(quantize.row_launch, ROW_SIZES)}.values():
            key = f"token/{element}/{launch['BLOCK']}"
            yield describe(op, key, quantize.row_kernel, types | {"data": data}, {}, launch, sizes)
        for launch in map(quantize.row_launch, ODD_SHARES):
            key = f"token/{element}/{launch['BLOCK']}/odd"
            yield replace(describe(op, key, quantize.row_kernel, types | {"data": data}, {}, launch), form_only=True)
    tensor = types | {"data": "*fp8e4nv", "amax": "*fp32"}
    for dynamic in (False, True):
        key = "tensor/dynamic" if dynamic else "tensor/static"
        constants = {"DYNAMIC": dynamic}
        yield describe(op, key, quantize.tensor_kernel, tensor, constants, quantize.FLAT_LAUNCH, sizes)
    odd = describe(op, "tensor/static/odd", quantize.tensor_kernel, tensor, {"DYNAMIC": False}, quantize.FLAT_LAUNCH)
    yield replace(odd, form_only=True)
    amax = {name: kind for name, kind in tensor.items() if name in quantize.amax_kernel.arg_names}
    yield describe(op, "tensor/amax", quantize.amax_kernel, amax, {}, quantize.FLAT_LAUNCH, sizes)
    groups = {
        "x": "*bf16",
        "factor": "*fp32",
        **dict.fromkeys(("row_stride", "size", "num_groups", "num_pairs"), "i32"),
    }
    for kind, size, data, scale in (
        ("group128", 128, "*fp8e4nv", "*fp32"),
        ("mxfp8", 32, "*fp8e4nv", "*u8"),
        ("nvfp4", 16, "*u8", "*fp8e4nv"),
    ):
        arguments = groups | {"data": data, "scale": scale}
        shape = {"KIND": kind, "GROUP": size}
        yield describe(op, kind, quantize.group_kernel, arguments, shape, quantize.GROUP_LAUNCH[size], sizes)


def _norm_quantize() -> Iterator[Variant]:
    types = {"x": "*bf16", "residual": "*bf16", "weight": "*bf16", "data": "*fp8e4nv", "scale": "*fp32", "eps": "fp32"}
    sizes = ("row_stride", "residual_stride", "size")
    types |= dict.fromkeys((*sizes, "num_groups"), "i32")
    forms: tuple[RowForm, ...] = ("token", "group128")
    for form in forms:
        for launch in {v["BLOCK"]: v for v in (norm_quantize.launch(size, form) for size in HIDDEN_SIZES)}.values():
            key = f"norm/{form}/{launch['BLOCK']}"
            kernel = norm_quantize.add_rmsnorm_quantize_kernel
            yield describe("quantize_activation", key, kernel, types, {}, launch, sizes)
            dequantized = types | {"weight": "*fp32"}
            row = describe("quantize_activation", f"{key}/fp32", kernel, dequantized, {}, launch, sizes)
            yield replace(row, form_only=True)


def _may_split(kind: str, features: Collection[str], more_than: float) -> bool:
    """Returns whether the tile for more than so many rows is launched with K split. Where SMs would idle, NARROW_KINDS
    take the tile of fewer columns instead of the one for up to NARROW_ROWS."""
    narrow = kind in NARROW_KINDS or "wgmma" in features
    return more_than < (SPLIT_ROWS if narrow else NARROW_ROWS)
