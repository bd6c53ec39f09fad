"""The number formats of quantized weights and activations, as data. No torch: planning reads this too."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from sglang.srt.errors import UserError

SCALE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "e8m0": 1, "e4m3": 1}


@dataclass(frozen=True, slots=True)
class Scheme:
    """A number format: a weight [N, K] is `element` values times scales. One scale covers `group` = (rows, columns),
    where 0 means all.

    With `global_scale` a second fp32 factor covers the whole matrix. Four-bit elements lie two to a byte along K, the
    even one in the low bits; int4 is stored plus 8. `activation` says how x is quantized before the product: "tensor"
    and "token" (one fp32 scale each), "group128" (one per 128 columns), "mxfp8" and "nvfp4" (blocks of 32 and 16); None
    keeps it in 16 bits and dequantizes the weights.
    """

    name: str
    element: str  # "e4m3", "int8", "int4", "e2m1"
    group: tuple[int, int]
    scale: str  # of SCALE_BYTES
    activation: str | None
    global_scale: bool = False

    @property
    def bits(self) -> int:
        """Returns the bits of a weight's code: 4 or 8."""
        return 4 if self.element in ("int4", "e2m1") else 8

    def scale_shape(self, rows: int, cols: int) -> tuple[int, ...]:
        """Returns the shape of the scales of a weight [rows, cols]: (), [rows], or one for each group."""
        per_row, per_col = self.group
        if per_row == 0:
            return ()
        if per_col == 0:
            return (rows,)
        return (-(-rows // per_row), -(-cols // per_col))

    def bytes_per_weight(self) -> float:
        """Returns the bytes of one weight of a large matrix, scales included."""
        rows, cols = self.group
        return self.bits / 8 + (SCALE_BYTES[self.scale] / (rows * cols) if rows and cols else 0)


SCHEMES: Mapping[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("fp8_tensor", "e4m3", (0, 0), "float32", "tensor"),
        Scheme("fp8_channel", "e4m3", (1, 0), "float32", "token"),
        Scheme("fp8_block", "e4m3", (128, 128), "float32", "group128"),
        Scheme("fp8_tensor_a16", "e4m3", (0, 0), "float32", None),
        Scheme("fp8_channel_a16", "e4m3", (1, 0), "float32", None),
        Scheme("fp8_block_a16", "e4m3", (128, 128), "float32", None),
        Scheme("mxfp8", "e4m3", (1, 32), "e8m0", "mxfp8"),
        Scheme("int8_channel", "int8", (1, 0), "float32", "token"),
        Scheme("int4_g32", "int4", (1, 32), "bfloat16", None),
        Scheme("int4_g64", "int4", (1, 64), "bfloat16", None),
        Scheme("int4_g128", "int4", (1, 128), "bfloat16", None),
        Scheme("int8_g32", "int8", (1, 32), "float16", None),
        Scheme("int8_g128", "int8", (1, 128), "float16", None),
        Scheme("mxfp4", "e2m1", (1, 32), "e8m0", None),
        Scheme("mxfp4_mxfp8", "e2m1", (1, 32), "e8m0", "mxfp8"),
        Scheme("nvfp4", "e2m1", (1, 16), "e4m3", "nvfp4", global_scale=True),
        Scheme("nvfp4_a16", "e2m1", (1, 16), "e4m3", None, global_scale=True),
    )
}

EXL3 = Scheme("exl3", "trellis", (128, 128), "float16", None)
"""EXL3's weights, which are no codes with scales: each module has bits and a codebook of its own (`configs/trellis`).
Blocks of 128 rows and 128 columns cannot be cut."""

HEAD_SCHEMES = frozenset(
    {"fp8_channel", "fp8_tensor", "nvfp4", "nvfp4_a16", "int4_g32", "int4_g64", "int4_g128", "int8_g32", "int8_g128"}
)
"""Schemes of output heads that have kernels with fp32 results. Heads in others are held in 16 bits."""


def holds_head(scheme: str) -> bool:
    """Returns whether output heads are held in the scheme, and not in 16 bits."""
    return scheme in HEAD_SCHEMES or scheme == EXL3.name


PLANE_COLUMNS = 128
"""Number to whose multiples the columns of weights in planes (layers/moe/expert_weights.py) are padded with zeros."""


def wants_planes(scheme: Scheme, features: Collection[str]) -> bool:
    """Returns whether GPUs with these features (of ArchTraits) dequantize the scheme's weights to 16 bits in registers,
    for which the weights are stored in planes."""
    return scheme.bits == 4 and (scheme.activation is None or "block_scaled_mma" not in features)


def describe_dequantization(scheme: Scheme, features: Collection[str]) -> str:
    """Describes how GPUs with these features dequantize the scheme to multiply it with wider instructions; "" where
    they multiply it natively."""
    if wants_planes(scheme, features) or (scheme.bits == 8 and scheme.activation is None):
        return "weights widened to 16 bits in registers"
    if scheme.element == "e2m1" and scheme.activation == "mxfp8":
        return "weights widened to e4m3 in registers"
    if scheme.activation == "mxfp8" and "block_scaled_mma" not in features:
        return "both sides widened to bf16"
    return ""


ALIGNED = 16
"""Number of elements to whose multiples rows are aligned in memory, so that kernels load them in whole vectors."""


def expert_share(intermediate_size: int, tp_size: int, scheme: Scheme | None) -> int:
    """Returns the intermediate dims of every expert for which a tensor-parallel rank has room.

    This is the even share if it cuts no group of scales and its rows can be loaded in whole vectors (ALIGNED elements).
    Otherwise it is whole groups and vectors: the last rank then holds fewer, padded with zeros. Where a rank would get
    none, shares are as even as possible without cutting a group. Raises UserError where a rank would still get none.
    """
    packed = scheme is not None and scheme.bits == 4
    group = 1 if scheme is None else max(1, *scheme.group)
    unit = max(group, 2 * ALIGNED if packed else ALIGNED)
    if intermediate_size % (tp_size * unit) == 0:
        return intermediate_size // tp_size
    what = f"expert intermediate size {intermediate_size}"
    # Kernels take packed rows in larger pieces anyway.
    unit = max(unit, 64) if packed else unit
    units = -(-intermediate_size // unit)
    if (tp_size - 1) * -(-units // tp_size) >= units:
        even = -(-intermediate_size // tp_size)
        if group == 1 and (tp_size - 1) * even < intermediate_size:
            return even  # tiny models, with about a vector for each rank
        scales = f" that share scales ({scheme.name})" if scheme is not None else ""
        raise UserError(
            f"{what} in groups of {unit}{scales} is too few for {tp_size} tensor-parallel ranks: one would hold none of"
            f" {units}"
        )
    return -(-units // tp_size) * unit


def dense_unit(intermediate_size: int, tp_size: int, scale_group: int) -> int:
    """Returns the number of an MLP's intermediate dims that stay together on one tensor-parallel rank; `scale_group` of
    them share a scale.

    This is the even share if it cuts no group; otherwise whole groups, if possible in whole memory lines such that
    every rank gets some. Raises UserError where a rank would get none.
    """
    if intermediate_size % (tp_size * scale_group) == 0:
        return intermediate_size // tp_size
    for line in (4 * ALIGNED, ALIGNED, 1):
        unit = math.lcm(scale_group, line)
        if -(-intermediate_size // unit) >= tp_size:
            return unit
    raise UserError(
        f"intermediate size {intermediate_size} in groups of {scale_group} that share scales is too few for {tp_size}"
        " tensor-parallel ranks: one would hold none"
    )
