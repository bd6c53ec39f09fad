"""Products of one row of x with a matrix in any weight format, without matrix instructions.

Threads along K multiply and add in fp32, so that the time is that of reading the weights once, and x stays in 16 bits
whatever the scheme: nothing has to be quantized first, and nothing is lost by it.
Reference: `quantization.reference.dequantize`.

A tile of weights is [BLOCK_N rows, C, W], where C * W elements (four-bit: words of eight) lie along K and cover COLS
columns. Where scales are per group of columns, each of C has one; in planes, one for each plane or two; packed words
have one each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from sglang.srt.kernels.scaled_product import ScaledProduct
from sglang.srt.layers.triton_ops.scaled_dot import (
    E2M1_SHIFT,
    LIFT,
    PAIR_PLANE,
    PAIR_PLANES,
    PLANE,
    PLANES,
    STRIP,
    decode_scale,
    lifted_pairs,
    nibbles,
    wide_halves,
)

HALF_SHIFT: tl.constexpr = tl.constexpr(2.0**64)
"""The part of E2M1_SHIFT that x takes before it meets a nibble, so that their product stays in the range of fp32."""


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
    if PACKED:
        return _add_packed(total, x, factor, there, w, w_scale, rows, w_stride, ws_stride, K, start, GROUP, C, EVEN_K)
    elif KIND == "planes" and ELEMENT == "e2m1" and GROUP == PAIR_PLANE:
        return _add_pairs(total, x, factor, there, w, w_scale, rows, w_stride, ws_stride, K, start, C, W, EVEN_K)
    elif KIND == "planes":
        return _add_planes(
            total, x, factor, there, w, w_scale, rows, w_stride, ws_stride, K, start, ELEMENT, GROUP, C, W, EVEN_K
        )
    else:
        weights = load_weights(
            there, w, w_scale, rows, first_row, w_stride, ws_stride, K, start, KIND, GROUP, C, W, EVEN_K
        )
        columns = load_columns(x, there, K, start, C, W, EVEN_K)
        return add_loaded(total, weights, columns, factor, KIND)


@triton.jit
def load_weights(
    there, w, w_scale, rows, first_row, w_stride, ws_stride, K, start,
    KIND: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, W: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Load the operands of `add_loaded` for a weight of 8 or 16 bits: a tile and, where they are per group, its
    scales. Nothing is computed of them here, or a kernel that loads them ahead of time would wait for them there."""
    row, c = rows[:, None, None], tl.arange(0, C)[None, :, None]
    column = start + c * W + tl.arange(0, W)[None, None, :]
    inside = there
    if not EVEN_K:
        inside = there & (column < K)
    # Eight to a thread, as of x: else x would go through shared memory, with a barrier, in each step.
    at = tl.max_contiguous(w + row * w_stride + column, [1, 1, 8])
    value = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")
    scale = value
    if KIND == "group128":
        scale = _raw_scale(w_scale, first_row // 128, ws_stride, start // GROUP + c, there, tl.cdiv(K, GROUP))
    if KIND == "mx":
        scale = _raw_scale(w_scale, row, ws_stride, start // GROUP + c, there, K // GROUP)
    return value, scale


@triton.jit
def load_columns(x, there, K, start, C: tl.constexpr, W: tl.constexpr, EVEN_K: tl.constexpr):
    """The columns of x that belong to a tile of `load_weights`."""
    column = start + tl.arange(0, C)[None, :, None] * W + tl.arange(0, W)[None, None, :]
    inside = there
    if not EVEN_K:
        inside = there & (column < K)
    return tl.load(x + column, mask=inside, other=0.0)


@triton.jit
def add_loaded(total, weights, columns, factor, KIND: tl.constexpr):
    """total + factor * columns * weights: what `load_columns` and `load_weights` loaded."""
    value, scale = weights
    a = columns.to(tl.float32) * factor
    if KIND == "group128" or KIND == "mx":
        a = a * decode_scale(scale)
    return total + value.to(tl.float32) * a


@triton.jit
def _add_planes(
    total, x, factor, there, w, w_scale, rows, w_stride, ws_stride, K, start,
    ELEMENT: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, W: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    row, c, j = rows[:, None, None], tl.arange(0, C)[None, :, None], tl.arange(0, W)[None, None, :]
    num_groups = tl.cdiv(K, GROUP)
    inside = there
    if not EVEN_K:
        inside = there & (start + c * STRIP < K)  # strips are stored whole
    at = w + row * w_stride + start // PLANES + c * W + j
    words = tl.load(at, mask=inside, other=0, eviction_policy="evict_first")
    for plane in tl.static_range(PLANES):
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
def _add_pairs(
    total, x, factor, there, w, w_scale, rows, w_stride, ws_stride, K, start,
    C: tl.constexpr, W: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """e2m1 in planes of pairs. W words of a strip to a thread, with the strip's scales, which are a word, and their
    columns of x by one load for each plane. K goes first, for threads to lie along it."""
    row, c, q = rows[None, :, None], tl.arange(0, C)[:, None, None], tl.arange(0, W)[None, None, :]
    strip, j = start // STRIP + c // (PLANE // W), c % (PLANE // W) * W
    inside = there
    if not EVEN_K:
        inside = there & (strip * STRIP < K)  # strips are stored whole
    at = w + row * w_stride + strip * PLANE + j + q
    words = tl.load(at, mask=inside, other=0, eviction_policy="evict_first")
    scales_at = w_scale.to(tl.pointer_type(tl.int32)) + row * (ws_stride // 4) + strip
    scales = tl.load(scales_at, mask=inside, other=0)
    part = tl.zeros_like(words).to(tl.float32)
    for plane in tl.static_range(PAIR_PLANES):
        column = strip * STRIP + plane * PAIR_PLANE + 2 * j + tl.arange(0, 2 * W)[None, None, :]
        x_inside = there
        if not EVEN_K:
            x_inside = there & (column < K)
        columns = tl.load(x + column, mask=x_inside, other=0.0)
        a, b = tl.split(tl.reshape(columns.to(tl.float32), (C, 1, W, 2)))
        low, high = wide_halves(lifted_pairs(words, scales, plane), tl.bfloat16)
        part += low * a
        part += high * b
    return total + tl.permute(part * (factor * LIFT), (1, 0, 2))


@triton.jit
def _add_packed(
    total, x, factor, there, w, w_scale, rows, w_stride, ws_stride, K, start,
    GROUP: tl.constexpr, C: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """e2m1, eight columns to a word. One word of each row to a thread, with its columns of x and its scale: with more,
    either would have to be moved between threads. K goes first, for threads to lie along it."""
    row, word = rows[None, :], start // PLANES + tl.arange(0, C)[:, None]
    inside = there
    if not EVEN_K:
        inside = there & (word * PLANES < K)
    at = tl.max_contiguous(w + row * w_stride + word, [1, 1])
    words = tl.load(at, mask=inside, other=0, eviction_policy="evict_first")
    scale = _scale_of(w_scale, row, ws_stride, word * PLANES // GROUP, there, tl.cdiv(K, GROUP))
    columns = _columns_of(x, word, inside, C)
    part = tl.zeros_like(scale)
    for plane in tl.static_range(PLANES):
        a = columns[plane].to(tl.float32)[:, None] * (factor * HALF_SHIFT)
        part += nibbles(words, plane, "e2m1") * a
    return total + tl.trans(part * (scale * (E2M1_SHIFT / HALF_SHIFT)))[:, :, None]


@triton.jit
def _columns_of(x, word, inside, C: tl.constexpr):
    """The eight columns of each word, as many tensors of [C], by one load."""
    values = tl.load(x + word * PLANES + tl.arange(0, PLANES)[None, :], mask=inside, other=0.0)
    even, odd = tl.split(tl.reshape(values, (C, 2, 2, 2)))
    even_0, even_1 = tl.split(even)
    odd_0, odd_1 = tl.split(odd)
    a_0, a_4 = tl.split(even_0)
    a_2, a_6 = tl.split(even_1)
    a_1, a_5 = tl.split(odd_0)
    a_3, a_7 = tl.split(odd_1)
    return a_0, a_1, a_2, a_3, a_4, a_5, a_6, a_7


@triton.jit
def _scale_of(w_scale, row, ws_stride, group, there, num_groups):
    return decode_scale(_raw_scale(w_scale, row, ws_stride, group, there, num_groups))


@triton.jit
def _raw_scale(w_scale, row, ws_stride, group, there, num_groups):
    return tl.load(w_scale + row * ws_stride + group, mask=there & (group < num_groups), other=0.0)


@triton.jit
def sum_rows(total):
    return tl.sum(tl.sum(total, axis=2), axis=1)


def pair_launch(product: ScaledProduct, tile: Mapping[str, int], cols: int) -> dict[str, Any]:
    """Constants of a kernel that calls `add_product` for a matrix of `cols` columns with a tile of `tiles.pair_cut`."""
    packed, step = product.pair_kind == "packed", tile["COLS"]
    if product.four_bit:
        width = 1 if packed else 4 if product.in_pairs else PLANE.value
        depth = step // (width * PLANES.value)
    else:
        width = product.group if product.kind in ("mx", "group128") else step
        depth = step // width
    shape = {"C": depth, "W": width, "EVEN_K": cols % step == 0, "PACKED": packed}
    return {**tile, **shape, **product.constants}
