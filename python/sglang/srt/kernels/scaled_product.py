"""The kinds of matrix products with quantized weights. Data only: no torch, no Triton."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sglang.srt.configs.quant_scheme import Scheme

PAIR_GROUP = 32
"""Columns of a plane of pairs, which is also a group of scales."""


@dataclass(frozen=True, slots=True)
class ScaledProduct:
    """How a product with weights of a quantization scheme is computed: the constants of `scaled_dot.multiply`, and the
    format to which the activations x are quantized."""

    kind: str
    element: str = ""
    group: int = 0  # columns a scale
    activation: str | None = None  # as in Scheme; None: x stays in 16 bits

    @property
    def constants(self) -> dict[str, str | int]:
        """Returns the constants that kernels are compiled with for this product."""
        return {"KIND": self.kind, "ELEMENT": self.element, "GROUP": self.group}

    @property
    def four_bit(self) -> bool:
        """Returns whether weights are codes of four bits, two of which share a byte."""
        return self.element in ("int4", "e2m1")

    @property
    def in_pairs(self) -> bool:
        """Returns whether weight planes hold pairs of columns (see ExpertWeights)."""
        return self.kind == "planes" and self.element == "e2m1" and self.group == PAIR_GROUP

    @property
    def weight_only(self) -> bool:
        """Returns whether weights of 8 bits are widened to the type of x, which stays in 16 bits. `kind` then says how
        their scales lie."""
        return self.activation is None and self.element in ("e4m3", "int8")

    @property
    def tile_kind(self) -> str:
        """The kind by which matrix tiles are chosen."""
        if self.weight_only:
            return "widened"
        if self.kind == "mx" and self.element == "e2m1":
            return "mx4" if self.group == 16 else "mx_e2m1"
        return self.kind

    @property
    def pair_kind(self) -> str:
        """The kind by which tiles are chosen where weights are streamed without matrix instructions."""
        if self.kind == "mx":
            return "packed" if self.element == "e2m1" else "mxfp8"
        if self.kind == "planes":
            return "pairs" if self.in_pairs else "planes"
        return self.element or "16-bit"


PLAIN = ScaledProduct("plain")


def product_of(scheme: Scheme | None, features: Collection[str]) -> ScaledProduct:
    """Returns the product that GPUs with these features (of ArchTraits) compute for a scheme; None: 16-bit weights. See
    `quant_scheme.describe_dequantization` for what is not native."""
    if scheme is None:
        return PLAIN
    group, packed = scheme.group[1], "block_scaled_mma" in features
    if scheme.activation in ("mxfp8", "nvfp4") and packed:
        return ScaledProduct("mx", scheme.element, group, scheme.activation)
    if scheme.bits == 4:
        return ScaledProduct("planes", scheme.element, group)
    if scheme.activation == "mxfp8":
        return ScaledProduct("mx", scheme.element, group, scheme.activation)
    by_row = "mx" if scheme.group[0] == 1 and group else "scaled"
    return ScaledProduct(
        "group128" if group == scheme.group[0] == 128 else by_row, scheme.element, group, scheme.activation
    )
