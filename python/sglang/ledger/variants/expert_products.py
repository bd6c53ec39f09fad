"""One grouped product of experts as its launch, described for the compiler."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from sglang.ledger.variant import Variant, describe
from sglang.srt.configs.activation import GPT_OSS_SWIGLU, SILU, Activation
from sglang.srt.configs.quant_scheme import SCHEMES, Scheme
from sglang.srt.kernels.scaled_product import ScaledProduct, product_of
from sglang.srt.kernels.spec import Tile
from sglang.srt.layers.moe.fused_moe_triton import kernels, kernels_zero_points
from sglang.srt.layers.moe.fused_moe_triton.capacity import ProductTile
from sglang.srt.layers.moe.fused_moe_triton.fused_moe import grouped_launch
from sglang.srt.layers.triton_ops.activation import gate_constants

GROUPING = {"sorted_pairs": "*i32", "block_expert": "*i32", "num_blocks": "*i32", "num_pairs": "i32"}
SIZES = {"hidden": "i32", "intermediate": "i32"}
STRIDES = dict.fromkeys(("w_stride", "ws_stride", "w_expert_stride", "ws_expert_stride"), "i32")
ROUTING = {"topk_weights": "*fp32", "topk_ids": "*i32"}
X_STRIDES = {"x_stride": "i32", "xs_stride": "i32"}
_MULTIPLES = ("hidden", "intermediate", "x_stride", "w_stride", "w_expert_stride")
_ELEMENTS = {"e4m3": "*fp8e4nv", "int8": "*i8", "int4": "*i32", "e2m1": "*u8"}
_SCALES = {"float32": "*fp32", "bfloat16": "*bf16", "e8m0": "*u8", "e4m3": "*fp8e4nv"}
_X_SCALES = {"mxfp8": "*u8", "nvfp4": "*fp8e4nv"}


@dataclass(frozen=True, slots=True)
class ExpertLaunch:
    """The launch that a variant is for: a scheme, how its products are computed, and the sizes of the experts."""

    scheme: Scheme | None
    product: ScaledProduct
    hidden: int = 4096
    intermediate: int = 1024
    top_k: int = 8
    activation: Activation = SILU
    bias: bool = False
    tail: str = ""  # of the rows' keys
    zero_points: bool = False

    @property
    def name(self) -> str:
        """Returns the part of row keys that names the weights' format."""
        zeros = "/zero_points" if self.zero_points else ""
        return (self.scheme.name if self.scheme else "bf16") + self.tail + zeros

    @property
    def kernels(self) -> ModuleType:
        """The module of the grouped products."""
        return kernels_zero_points if self.zero_points else kernels

    @property
    def in_planes(self) -> bool:
        """Returns whether weights are stored in planes."""
        return self.product.kind == "planes"

    def matrix_types(self, weights: str, words: bool) -> dict[str, str]:
        """The types of the parameters that describe one matrix; what it has not is its data again."""
        scheme = self.scheme
        data = "*bf16" if scheme is None else _ELEMENTS[scheme.element]
        if scheme is not None and scheme.bits == 4 and (self.in_planes or words):
            data = "*i32"
        return {
            weights: data,
            "w_scale": data if scheme is None else "*i16" if self.zero_points else _SCALES[scheme.scale],
            "w_factor": "*fp32" if self._has_factor else data,
            "bias": "*bf16" if self.bias else data,
        }

    def operand_types(self, x: str) -> dict[str, str]:
        """Returns Triton's types of the activations `x` and their scales."""
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
        """Returns the constants that switch optional operands on."""
        return {"HAS_FACTOR": self._has_factor, "HAS_BIAS": self.bias}

    def multiples(self, depth: int) -> tuple[str, ...]:
        """The numbers that are multiples of 16 with weights of `depth` columns."""
        group = self.scheme.group[1] if self.scheme is not None else 0
        if not group:  # scales of rows and tensors have strides of 1 and 0
            return _MULTIPLES
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
    number_format = SCHEMES[scheme] if scheme else None
    product = product_of(number_format, features)
    launch = ExpertLaunch(number_format, product, hidden, intermediate, top_k, activation, bias)
    return grouped(kind, launch, dict(tile), features)


def grouped(kind: str, experts: ExpertLaunch, tile: Tile, features: Collection[str]) -> Variant:
    """Returns the variant of a grouped product. kind: "gate_up" or "down"."""
    if kind == "gate_up":
        fn, weights, x, depth, second = experts.kernels.gate_up_kernel, "w13", "x", experts.hidden, experts.intermediate
        operands = {"inter": "*bf16", "top_k": "i32"}
    else:
        fn, weights, x, depth, second = experts.kernels.down_kernel, "w2", "inter", experts.intermediate, 0
        operands = {"out": "*bf16"}
    types = GROUPING | SIZES | STRIDES | X_STRIDES | operands
    types |= experts.operand_types(x) | experts.matrix_types(weights, False)
    launch = grouped_launch(experts.product, tile, depth, second, features)
    constants = {name: value for name, value in launch.items() if name not in tile} | experts.flags
    if kind == "gate_up":
        constants |= gate_constants(experts.activation)
    even = "even" if launch["EVEN_K"] else "ragged"
    tail = "/bias" if experts.bias else ""
    key, multiples = f"{kind}/{experts.name}/{even}{tail}", experts.multiples(depth)
    return describe("fused_moe", key, fn, types, constants, tile, multiples)


def product_variant_of(product: ProductTile, features: Collection[str]) -> Variant:
    """The launch of a tile on a GPU with these features, described for the compiler."""
    activation = GPT_OSS_SWIGLU if product.bias else SILU
    return product_variant(
        product.kind,
        product.scheme,
        product.tile,
        product.hidden,
        product.intermediate,
        8,
        features,
        activation,
        product.bias,
    )
