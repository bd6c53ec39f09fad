"""Products of one row of x with a matrix in any weight format, without matrix instructions.

Threads along K multiply and add in fp32, so that the time is that of reading the weights once, and x stays in 16 bits
whatever the scheme: nothing has to be quantized first, and nothing is lost by it.
Reference: `quantization.reference.dequantize`.

A tile of weights is [BLOCK_N rows, C, W], where C * W elements (four-bit: words of eight) lie along K and cover COLS
columns. Where scales are per group of columns, each of C has one; in planes, one for each plane or two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.scaled_dot import (
    E2M1_SHIFT,
    PLANE,
    PLANES,
    STRIP,
    Product,
    decode_scale,
    nibbles,
)

if TYPE_CHECKING:
    from sglang.srt.layers.moe.fused_moe_triton.tiles import PairTile


@triton.jit
def add_product(
    total,  # [BLOCK_N, C, W] fp32
    x,  # one row
    factor,  # of x
    there,  # whether to read anything
    w,
    w_scale,
    rows,  # [BLOCK_N] int64
    first_row,  # "group128": whose scale all rows share
    w_stride,
    ws_stride,
    K,
    start,
    KIND: tl.constexpr,
    ELEMENT: tl.constexpr,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """total + factor * x * w[rows] for the columns from `start` on that a tile covers."""
    if KIND == "planes" or PACKED:
        return _add_nibbles(
            total, x, factor, there, w, w_scale, rows, w_stride, ws_stride, K, start,
            ELEMENT, GROUP, PACKED, C, W, EVEN_K,
        )  # fmt: skip
    else:
        row, c = rows[:, None, None], tl.arange(0, C)[None, :, None]
        column = start + c * W + tl.arange(0, W)[None, None, :]
        inside = there
        if not EVEN_K:
            inside = there & (column < K)
        # Eight to a thread, as of x: else x would go through shared memory, with a barrier, in each step.
        at = tl.max_contiguous(w + row * w_stride + column, [1, 1, 8])
        value = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")
        a = tl.load(x + column, mask=inside, other=0.0).to(tl.float32) * factor
        if KIND == "group128":
            a *= _scale_of(w_scale, first_row // 128, ws_stride, start // GROUP + c, there, tl.cdiv(K, GROUP))
        if KIND == "mx":
            a = a * _scale_of(w_scale, row, ws_stride, start // GROUP + c, there, K // GROUP)
        return total + value.to(tl.float32) * a


@triton.jit
def _add_nibbles(
    total, x, factor, there, w, w_scale, rows, w_stride, ws_stride, K, start,
    ELEMENT: tl.constexpr, GROUP: tl.constexpr, PACKED: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    EVEN_K: tl.constexpr,
):  # fmt: skip
    row, c, j = rows[:, None, None], tl.arange(0, C)[None, :, None], tl.arange(0, W)[None, None, :]
    num_groups = tl.cdiv(K, GROUP)
    inside = there
    if not EVEN_K:
        # A strip of planes is stored whole; of packed columns only those that exist.
        inside = there & (start + c * (W * PLANES) + j * (PLANES if PACKED else 0) < K)
    at = w + row * w_stride + start // PLANES + c * W + j
    words = tl.load(at, mask=inside, other=0, eviction_policy="evict_first")
    if PACKED:
        scale = _scale_of(w_scale, row, ws_stride, start // GROUP + c, there, num_groups)
    for plane in tl.static_range(PLANES):
        if PACKED:
            column = start + (c * W + j) * PLANES + plane
        else:
            column = start + c * STRIP + plane * PLANE + j
            if (plane * PLANE) % GROUP == 0:
                group = (start + c * STRIP + plane * PLANE) // GROUP
                scale = _scale_of(w_scale, row, ws_stride, group, there, num_groups)
        x_inside = there
        if not EVEN_K:
            x_inside = there & (column < K)
        a = tl.load(x + column, mask=x_inside, other=0.0).to(tl.float32) * factor
        value = nibbles(words, plane, ELEMENT)
        if ELEMENT == "int4":
            total += (value * scale + scale * -136.0) * a
        else:
            total += value * E2M1_SHIFT * scale * a
    return total


@triton.jit
def _scale_of(w_scale, row, ws_stride, group, there, num_groups):
    return decode_scale(tl.load(w_scale + row * ws_stride + group, mask=there & (group < num_groups), other=0.0))


@triton.jit
def sum_rows(total):
    return tl.sum(tl.sum(total, axis=2), axis=1)


def pair_launch(product: Product, pair_tile: PairTile, cols: int, rows: int) -> dict[str, Any]:
    """Constants of a kernel that calls `add_product` for a matrix [rows, cols]."""
    four_bit, packed = product.element in ("int4", "e2m1"), product.pair_kind == "packed"
    tile = pair_tile.cut(cols, STRIP.value if four_bit else 128 if product.kind == "group128" else 16)
    if product.kind == "group128":  # a tile's rows share their scales
        while 128 % tile["BLOCK_N"] or rows % tile["BLOCK_N"]:
            tile["BLOCK_N"] //= 2
    step = tile["COLS"]
    if four_bit:
        width = product.group // PLANES.value if packed else PLANE.value
        depth = step // (width * PLANES.value)
    else:
        width = product.group if product.kind in ("mx", "group128") else step
        depth = step // width
    shape = {"C": depth, "W": width, "EVEN_K": cols % step == 0, "PACKED": packed}
    return {**tile, **shape, **product.constants}
