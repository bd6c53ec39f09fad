"""Launch variants of the expert kernels, described for the ledger.

Each scheme with its tiles of `tiles.py` and one set of sizes. Of the sizes a compiler sees only whether blocks divide
them ("even", "ragged"): those that no block divides are GPT-OSS's, in every format it comes in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sglang.srt.configs.activation import GPT_OSS_SWIGLU, SILU, Activation
from sglang.srt.configs.quant_scheme import SCHEMES, Scheme
from sglang.srt.kernels.variant import FormRule, Variant
from sglang.srt.layers.moe.fused_moe_triton import align, kernels, kernels_few
from sglang.srt.layers.moe.fused_moe_triton.capacity import product_variant_of
from sglang.srt.layers.moe.fused_moe_triton.config_files import shipped_products
from sglang.srt.layers.moe.fused_moe_triton.fused_moe import (
    COMBINE_BLOCK,
    gate_constants,
    grouped_launch,
)
from sglang.srt.layers.moe.fused_moe_triton.tiles import PAIR_TILES, Tile, last_resort, tile_rows
from sglang.srt.layers.triton_ops.quant_variants import (
    COLUMNS,
    EVEN,
    LONE_SCALES,
    PRODUCT_ABSENT,
    RAGGED,
    SCALE_STRIDES,
    products,
)
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
MOST_EXPERTS = 512
MOST_CHOICES = 12
"""Of a token, a shared expert among them."""

_GROUPED = FormRule(
    # GROUP_M orders programs.
    free=frozenset({"GROUP_M"}),
    at_least=frozenset({"EVEN_K"}),
    counts=frozenset({"num_pairs", "top_k"}),
    counts_where=LONE_SCALES,
    absent=PRODUCT_ABSENT | {"X_FACTOR": ("x_factor",)},
)
_PAIRS = FormRule(
    free=frozenset({"TOP_K", "STEPS"}),
    counts=frozenset({"top_k", *SCALE_STRIDES}),
    absent=PRODUCT_ABSENT,
)
FORM_RULES = {
    "kernels.gate_up_kernel": _GROUPED,
    "kernels.down_kernel": _GROUPED,
    "kernels_few.gate_up_pairs_kernel": _PAIRS,
    "kernels_few.down_sum_kernel": _PAIRS,
    "kernels.combine_kernel": FormRule(at_most=frozenset({"TOP_K"})),
    "align.align_small_kernel": FormRule(free=frozenset({"BLOCK_M"}), at_most=frozenset({"EXPERTS"})),
    "align.align_count_kernel": FormRule(at_most=frozenset({"EXPERTS"})),
    "align.align_offsets_kernel": FormRule(free=frozenset({"BLOCK_M"}), at_most=frozenset({"EXPERTS"})),
}

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

    def multiples(self, depth: int) -> tuple[str, ...]:
        """The numbers that are multiples of 16 with weights of `depth` columns."""
        group = self.scheme.group[1] if self.scheme is not None else 0
        if not group:  # scales of rows and tensors have strides of 1 and 0
            odd = {"intermediate"} if self.intermediate % 16 else set()
            odd |= {"x_stride", "w_stride"} if depth % 16 else set()
            return tuple(name for name in _MULTIPLES if name not in odd)
        rows_of_scales = self.product.kind == "mx"  # for the others it does not matter: LONE_SCALES
        unaligned = rows_of_scales and -(-depth // group) % 16 != 0
        return (*_MULTIPLES, "ws_expert_stride", *(() if unaligned else ("ws_stride", "xs_stride")))


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
    even = ("even" if launch["EVEN_K"] else "ragged") + ("/odd" if experts.intermediate % 16 else "")
    tail = "/bias" if experts.bias else ""
    key, multiples = f"{kind}/{experts.name}/{even}{tail}", experts.multiples(depth)
    return describe("fused_moe", key, fn, types, constants, tile, multiples)


def variants(op: str, features: tuple[str, ...] = ()) -> Iterator[Variant]:
    """Every launch of the experts with weights of any scheme, and with GPT-OSS's biases. Of launches that differ in a
    number of steps alone, which costs the same, the first stands for all."""
    assert op == "fused_moe"
    first: dict[tuple[str, tuple[Any, ...]], Variant] = {}
    for variant in _launches(op, features):
        first.setdefault((variant.key, tuple(variant.tile.items())), variant)
    yield from first.values()


def _launches(op: str, features: tuple[str, ...]) -> Iterator[Variant]:
    for scheme in (None, *SCHEMES.values()):
        for product, tail in products(scheme, features):
            yield from _of_scheme(Experts(scheme, product, tail=tail), features)
    yield from _gpt_oss(features)
    types = {"pair_out": "*bf16", "out": "*bf16", "num_cols": "i32"} | _ROUTING
    launch = {"BLOCK": COMBINE_BLOCK, "num_warps": 4}
    yield describe(op, "combine", kernels.combine_kernel, types, {"TOP_K": MOST_CHOICES}, launch, ("num_cols",))
    yield from (product_variant_of(product, features) for product in shipped_products(features))
    yield from _alignment()


def _of_scheme(experts: Experts, features: Collection[str]) -> Iterator[Variant]:
    """Hidden sizes are multiples of what a block takes, but GPT-OSS's; a rank's share of an expert need not be."""
    ragged = replace(experts, intermediate=RAGGED)
    for row in tile_rows(experts.product.tile_kind, features):
        yield _grouped("gate_up", experts, row.gate_up, features)
        yield _grouped("down", experts, row.down, features)
        yield replace(_grouped("down", ragged, row.down, features), form_only=True)
    yield from _last_resort(experts, features)
    last = replace(_grouped("down", ragged, last_resort(experts.product.tile_kind).down, features), default=False)
    yield replace(last, form_only=True)
    yield from _few(experts, (EVEN, 2816), COLUMNS)


def _last_resort(experts: Experts, features: Collection[str]) -> Iterator[Variant]:
    last = last_resort(experts.product.tile_kind)
    yield replace(_grouped("gate_up", experts, last.gate_up, features), default=False)
    yield replace(_grouped("down", experts, last.down, features), default=False)


def _gpt_oss(features: Collection[str]) -> Iterator[Variant]:
    """Sizes that no block divides: GPT-OSS's, with its biases, in every format it comes in."""
    for name in (None, "mxfp4", "mxfp4_mxfp8"):
        scheme = SCHEMES[name] if name else None
        product = product_of(scheme, features)
        experts = Experts(scheme, product, 2880, 2880, 4, GPT_OSS_SWIGLU, bias=True)
        for row in tile_rows(product.tile_kind, features):
            yield _grouped("gate_up", experts, row.gate_up, features)
            yield _grouped("down", experts, row.down, features)
        yield from (replace(variant, form_only=True) for variant in _last_resort(experts, features))
        yield from _few(experts, (2880,), (2880, 768, 384))
    # Shares of 16-bit experts: of two ranks, which no block divides, and of eight, which is no multiple of 16.
    half, odd = (Experts(None, product_of(None, features), 2880, n, 4, GPT_OSS_SWIGLU, bias=True) for n in (1440, 360))
    for row in tile_rows("plain", features):
        yield replace(_grouped("down", half, row.down, features), form_only=True)
        yield replace(_grouped("gate_up", odd, row.gate_up, features), form_only=True)
        yield replace(_grouped("down", odd, row.down, features), form_only=True)
    yield from (replace(variant, form_only=True) for variant in _last_resort(odd, features))
    yield from (replace(variant, form_only=True) for variant in _few(odd, (2880,), (360,)))


def _few(experts: Experts, hidden_sizes: Collection[int], shares: Collection[int]) -> Iterator[Variant]:
    """One row for each way of cutting the columns: hidden sizes those of the first matrix, shares of the second."""
    up_tile, down_tile = PAIR_TILES[experts.product.pair_kind]
    types = _SIZES | _STRIDES | _ROUTING | {"top_k": "i32", "x_stride": "i32"}
    types |= {"x": "*bf16", "inter": "*bf16", "out": "*bf16"}
    group = experts.scheme.group[1] if experts.scheme is not None and experts.scheme.group[0] == 1 else 1
    for hidden in hidden_sizes:
        launch = pair_launch(experts.product, up_tile, hidden, experts.intermediate)
        own, constants = types | experts.matrix_types("w13", True), gate_constants(experts.activation)
        yield _of_pairs("gate_up_pairs", kernels_few.gate_up_pairs_kernel, own, launch, constants, experts, hidden)
    for share in shares:
        if group and share % group:
            continue  # no rank's share cuts a group
        launch = pair_launch(experts.product, down_tile, share, experts.hidden)
        own = types | experts.matrix_types("w2", True)
        steps = {"TOP_K": experts.top_k, "STEPS": -(-share // launch["COLS"])}
        yield _of_pairs("down_sum", kernels_few.down_sum_kernel, own, launch, steps, experts, share)


def _of_pairs(
    kernel: str,
    fn: Any,
    types: dict[str, str],
    launch: dict[str, Any],
    constants: dict[str, Any],
    experts: Experts,
    depth: int,
) -> Variant:
    tile = {name: launch[name] for name in ("BLOCK_N", "COLS", "UNROLL", "num_warps")}
    constants = constants | experts.flags | {name: value for name, value in launch.items() if name not in tile}
    own = {name: kind for name, kind in types.items() if name in fn.arg_names}
    # Words of eight columns.
    words = experts.product.pair_kind == "packed" and depth % 128 != 0
    multiples = (name for name in experts.multiples(depth) if name in fn.arg_names)
    key = f"{kernel}/{experts.name}" + ("" if launch["EVEN_K"] else "/ragged") + ("/words" if words else "")
    key += ("/odd" if experts.intermediate % 16 else "") + ("/bias" if experts.bias else "")
    aligned = tuple(name for name in multiples if not (words and name == "w_stride"))
    return describe("fused_moe", key, fn, own, constants, tile, aligned)


def _alignment() -> Iterator[Variant]:
    types = {
        "topk_ids": "*i32",
        "cursors": "*i32",
        "counts": "*i32",
        "num_places": "i32",
    } | _GROUPING
    steps = {
        align.align_small_kernel: {"EXPERTS": MOST_EXPERTS, "BLOCK_M": 16, "CHUNK": align.CHUNK, "num_warps": 16},
        align.align_count_kernel: {"EXPERTS": MOST_EXPERTS, "CHUNK": align.CHUNK, "num_warps": 8},
        align.align_offsets_kernel: {"EXPERTS": MOST_EXPERTS, "BLOCK_M": 64, "num_warps": 8},
        align.align_scatter_kernel: {"CHUNK": align.CHUNK, "num_warps": 8},
    }
    for fn, launch in steps.items():
        own = {name: kind for name, kind in types.items() if name in fn.arg_names}
        yield describe("fused_moe", fn.fn.__name__.removesuffix("_kernel"), fn, own, {}, launch)
