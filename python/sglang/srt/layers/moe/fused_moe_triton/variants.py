"""Launch variants of the expert kernels, described for the ledger.

Each scheme with its tiles of `tiles.py` and one set of sizes. Of the sizes a compiler sees only whether blocks divide
them ("even", "ragged"): those that no block divides are GPT-OSS's, in every format it comes in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sglang.srt.configs.quant_scheme import SCHEMES, Scheme
from sglang.srt.kernels.variant import Variant
from sglang.srt.layers.moe.expert_weights import GPT_OSS_SWIGLU, SILU, Activation
from sglang.srt.layers.moe.fused_moe_triton import align, kernels, kernels_few
from sglang.srt.layers.moe.fused_moe_triton.capacity import product_variant_of
from sglang.srt.layers.moe.fused_moe_triton.config_files import shipped_products
from sglang.srt.layers.moe.fused_moe_triton.fused_moe import (
    COMBINE_BLOCK,
    gate_constants,
    grouped_launch,
)
from sglang.srt.layers.moe.fused_moe_triton.tiles import PAIR_TILES, Tile, last_resort, tile_rows
from sglang.srt.layers.triton_ops.quant_variants import products
from sglang.srt.layers.triton_ops.scaled_dot import Product, product_of
from sglang.srt.layers.triton_ops.streamed_dot import pair_launch
from sglang.srt.layers.triton_ops.variants import describe

OPS = ("fused_moe",)

_GROUPING = {"sorted_pairs": "*i32", "block_expert": "*i32", "num_blocks": "*i32", "num_pairs": "i32"}
_SIZES = {"hidden": "i32", "intermediate": "i32"}
_STRIDES = dict.fromkeys(("w_stride", "ws_stride", "w_expert_stride", "ws_expert_stride"), "i32")
_ROUTING = {"topk_weights": "*fp32", "topk_ids": "*i32"}
_X_STRIDES = {"x_stride": "i32", "xs_stride": "i32"}
_MULTIPLES = ("hidden", "intermediate", "x_stride", "w_stride", "w_expert_stride")
_SCALE_MULTIPLES = ("ws_stride", "ws_expert_stride", "xs_stride")

_ELEMENTS = {"e4m3": "*fp8e4nv", "int8": "*i8", "int4": "*i32", "e2m1": "*u8"}
_SCALES = {"float32": "*fp32", "bfloat16": "*bf16", "e8m0": "*u8", "e4m3": "*fp8e4nv"}
_X_SCALES = {"mxfp8": "*u8", "nvfp4": "*fp8e4nv"}


@dataclass(frozen=True, slots=True)
class Experts:
    """What a variant is for: a scheme, how its products are computed, and the sizes of the experts."""

    scheme: Scheme | None
    product: Product
    hidden: int = 4096
    intermediate: int = 1024
    top_k: int = 8
    activation: Activation = SILU
    bias: bool = False
    tail: str = ""  # of the rows' keys

    @property
    def name(self) -> str:
        return (self.scheme.name if self.scheme else "bf16") + self.tail

    @property
    def in_planes(self) -> bool:
        return self.product.kind == "planes"

    def matrix_types(self, weights: str, words: bool) -> dict[str, str]:
        """Of the parameters that describe one matrix; what it has not is its data again."""
        scheme = self.scheme
        data = "*bf16" if scheme is None else _ELEMENTS[scheme.element]
        if scheme is not None and scheme.bits == 4 and (self.in_planes or words):
            data = "*i32"
        return {
            weights: data,
            "w_scale": data if scheme is None else _SCALES[scheme.scale],
            "w_factor": "*fp32" if self._has_factor else data,
            "bias": "*bf16" if self.bias else data,
        }

    def operand_types(self, x: str) -> dict[str, str]:
        kind, scheme = self.product.activation, self.scheme
        if kind is None or scheme is None:
            return {x: "*bf16", "x_scale": "*bf16", "x_factor": "*bf16"}
        data = "*u8" if kind == "nvfp4" else "*i8" if scheme.element == "int8" else "*fp8e4nv"
        return {x: data, "x_scale": _X_SCALES.get(kind, "*fp32"), "x_factor": "*fp32" if kind == "nvfp4" else data}

    @property
    def _has_factor(self) -> bool:
        return self.scheme is not None and self.scheme.global_scale

    @property
    def flags(self) -> dict[str, Any]:
        return {"HAS_FACTOR": self._has_factor, "HAS_BIAS": self.bias}

    @property
    def multiples(self) -> tuple[str, ...]:
        return _MULTIPLES + (_SCALE_MULTIPLES if self.scheme is not None and self.scheme.group[1] else ())


def product_variant(
    kind: str,
    scheme: str | None,
    tile: Mapping[str, int],
    hidden: int,
    intermediate: int,
    top_k: int,
    features: Collection[str] = (),
    activation: Activation = SILU,
    bias: bool = False,
) -> Variant:
    """One grouped product, `kind` "gate_up" or "down", with a tile on a GPU with these features (of ArchTraits)."""
    own = SCHEMES[scheme] if scheme else None
    product = product_of(own, features)
    return _grouped(kind, Experts(own, product, hidden, intermediate, top_k, activation, bias), dict(tile), features)


def _grouped(kind: str, experts: Experts, tile: Tile, features: Collection[str]) -> Variant:
    if kind == "gate_up":
        fn, weights, x, depth, second = kernels.gate_up_kernel, "w13", "x", experts.hidden, experts.intermediate
        own = {"inter": "*bf16", "top_k": "i32"}
    else:
        fn, weights, x, depth, second = kernels.down_kernel, "w2", "inter", experts.intermediate, 0
        own = {"out": "*bf16"}
    types = _GROUPING | _SIZES | _STRIDES | _X_STRIDES | own
    types |= experts.operand_types(x) | experts.matrix_types(weights, False)
    launch = grouped_launch(experts.product, tile, depth, second, features)
    constants = {name: value for name, value in launch.items() if name not in tile} | experts.flags
    if kind == "gate_up":
        constants |= gate_constants(experts.activation)
    even = "even" if launch["EVEN_K"] else "ragged"
    tail = "/bias" if experts.bias else ""
    return describe("fused_moe", f"{kind}/{experts.name}/{even}{tail}", fn, types, constants, tile, experts.multiples)


def variants(op: str, features: tuple[str, ...] = ()) -> Iterator[Variant]:
    """Every launch of the experts with weights of any scheme, and with GPT-OSS's biases."""
    assert op == "fused_moe"
    for scheme in (None, *SCHEMES.values()):
        for product, tail in products(scheme, features):
            experts = Experts(scheme, product, tail=tail)
            for row in tile_rows(product.tile_kind, features):
                yield _grouped("gate_up", experts, row.gate_up, features)
                yield _grouped("down", experts, row.down, features)
            last = last_resort(product.tile_kind)
            yield replace(_grouped("gate_up", experts, last.gate_up, features), default=False)
            yield replace(_grouped("down", experts, last.down, features), default=False)
            yield from _few(experts)
    yield from _ragged(features)
    types = {"pair_out": "*bf16", "out": "*bf16", "num_cols": "i32"} | _ROUTING
    launch = {"BLOCK": COMBINE_BLOCK, "num_warps": 4}
    yield describe(op, "combine", kernels.combine_kernel, types, {"TOP_K": 8}, launch, ("num_cols",))
    yield from (product_variant_of(product, features) for product in shipped_products(features))
    yield from _alignment()


def _ragged(features: Collection[str]) -> Iterator[Variant]:
    """Sizes that no block divides: GPT-OSS's, with its biases, in every format it comes in."""
    for name in (None, "mxfp4", "mxfp4_mxfp8"):
        scheme = SCHEMES[name] if name else None
        product = product_of(scheme, features)
        experts = Experts(scheme, product, 2880, 2880, 4, GPT_OSS_SWIGLU, bias=True)
        for row in tile_rows(product.tile_kind, features):
            yield _grouped("gate_up", experts, row.gate_up, features)
            yield _grouped("down", experts, row.down, features)
        yield from _few(experts)


def _few(experts: Experts) -> Iterator[Variant]:
    up_tile, down_tile = PAIR_TILES[experts.product.pair_kind]
    tail = "/bias" if experts.bias else ""
    types = _SIZES | _STRIDES | _ROUTING | {"top_k": "i32", "x_stride": "i32"}
    types |= {"x": "*bf16", "inter": "*bf16", "out": "*bf16"}
    launch = pair_launch(experts.product, up_tile, experts.hidden, experts.intermediate)
    yield _of_pairs(
        f"gate_up_pairs/{experts.name}{tail}",
        kernels_few.gate_up_pairs_kernel,
        types | experts.matrix_types("w13", True),
        launch,
        experts.flags | gate_constants(experts.activation),
        experts,
    )
    launch = pair_launch(experts.product, down_tile, experts.intermediate, experts.hidden)
    steps = -(-experts.intermediate // launch["COLS"])
    yield _of_pairs(
        f"down_sum/{experts.name}{tail}",
        kernels_few.down_sum_kernel,
        types | experts.matrix_types("w2", True),
        launch,
        experts.flags | {"TOP_K": experts.top_k, "STEPS": steps},
        experts,
    )


def _of_pairs(
    key: str, fn: Any, types: dict[str, str], launch: dict[str, Any], constants: dict[str, Any], experts: Experts
) -> Variant:
    tile = {name: launch[name] for name in ("BLOCK_N", "COLS", "UNROLL", "num_warps")}
    constants = constants | {name: value for name, value in launch.items() if name not in tile}
    own = {name: kind for name, kind in types.items() if name in fn.arg_names}
    multiples = tuple(name for name in experts.multiples if name in fn.arg_names)
    return describe("fused_moe", key, fn, own, constants, tile, multiples)


def _alignment() -> Iterator[Variant]:
    types = {
        "topk_ids": "*i32",
        "cursors": "*i32",
        "counts": "*i32",
        "num_places": "i32",
    } | _GROUPING
    steps = {
        align.align_small_kernel: {"EXPERTS": 512, "BLOCK_M": 16, "CHUNK": align.CHUNK, "num_warps": 16},
        align.align_count_kernel: {"EXPERTS": 512, "CHUNK": align.CHUNK, "num_warps": 8},
        align.align_offsets_kernel: {"EXPERTS": 512, "BLOCK_M": 64, "num_warps": 8},
        align.align_scatter_kernel: {"CHUNK": align.CHUNK, "num_warps": 8},
    }
    for fn, launch in steps.items():
        own = {name: kind for name, kind in types.items() if name in fn.arg_names}
        yield describe("fused_moe", fn.fn.__name__.removesuffix("_kernel"), fn, own, {}, launch)
