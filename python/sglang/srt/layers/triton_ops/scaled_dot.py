"""x @ w^T of one tile for every weight format: the loop over K that grouped and dense kernels share.

`multiply` is called from a kernel with the rows of x and of w that make up the tile. What it does depends on KIND:

  "plain"     16-bit floats as they are
  "scaled"    e4m3 or int8 on both sides; one scale a row of x and one a row of w (or one of all, stride 0)
  "group128"  e4m3; one scale per 128 columns of a row of x and per 128x128 of w
  "planes"    four-bit w in planes of 16 columns, or of 16 pairs of columns (e2m1 in groups of 32), widened to x's type
              in registers
  "mx"        block-scaled matrix instructions on packed operands, where the GPU has them

Reference: `quantization.reference.dequantize` and `round_activation`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.srt.kernels.scaled_product import PAIR_GROUP

PLANE: tl.constexpr = tl.constexpr(16)
PLANES: tl.constexpr = tl.constexpr(8)
STRIP: tl.constexpr = tl.constexpr(128)
"""Columns of one round of planes."""
PAIR_PLANES: tl.constexpr = tl.constexpr(4)
PAIR_PLANE: tl.constexpr = tl.constexpr(32)
"""Columns of a plane of pairs, which is also a group of scales."""
E2M1_SHIFT: tl.constexpr = tl.constexpr(2.0**126)
"""An e2m1 code in the lowest exponent and highest mantissa bits of an fp32 is its value divided by this."""
LIFT: tl.constexpr = tl.constexpr(2.0**24)
"""So much of E2M1_SHIFT is left to the end, for bfloat16: the rest times any sensible scale stays below infinity."""
E4M3_OF_E2M1: tl.constexpr = tl.constexpr(64.0)
"""The same for an e2m1 code in the bits of an e4m3."""
LIFTED_SCALES: tl.constexpr = tl.constexpr(0x66666666)
"""Added to four e8m0 scales at once it multiplies each by E2M1_SHIFT / LIFT, which is 2**102."""
HIGH_HALF: tl.constexpr = tl.constexpr(-65536)
"""0xFFFF0000"""
INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter has no instructions to name."""

assert PAIR_PLANE.value == PAIR_GROUP


@triton.jit
def zeros(M: tl.constexpr, N: tl.constexpr, dtype: tl.constexpr, SWAP: tl.constexpr):
    """An accumulator of [M, N], or of its transpose."""
    if SWAP:
        return tl.zeros((N, M), dtype)
    else:
        return tl.zeros((M, N), dtype)


@triton.jit
def dot(a, w, acc, SWAP: tl.constexpr):
    """acc + a @ w^T of a [M, K], w [N, K]. SWAP: as w @ a^T, which lets few rows of x be the narrow side of wgmma."""
    if SWAP:
        return tl.dot(w, tl.trans(a), acc, out_dtype=acc.dtype)
    else:
        return tl.dot(a, tl.trans(w), acc, out_dtype=acc.dtype)


@triton.jit
def over_rows(values, SWAP: tl.constexpr):
    """[M] values of the rows of x, to broadcast over the accumulator."""
    if SWAP:
        return values[None, :]
    else:
        return values[:, None]


@triton.jit
def over_cols(values, SWAP: tl.constexpr):
    """[N] values of the rows of w, to broadcast over the accumulator."""
    if SWAP:
        return values[:, None]
    else:
        return values[None, :]


@triton.jit
def decode_scale(scale):
    """A stored scale -> fp32; uint8 is an exponent with bias 127 (254 at most: 255 is not a number)."""
    if scale.dtype == tl.uint8:
        # Exponent 0 stands for 2**-127, which only a denormal holds.
        bits = tl.where(scale == 0, 1 << 22, scale.to(tl.int32) << 23)
        return bits.to(tl.float32, bitcast=True)
    else:
        return scale.to(tl.float32)


@triton.jit
def nibbles(words, plane: tl.constexpr, ELEMENT: tl.constexpr):
    """The nibbles of one plane as fp32: int4 plus 136 (that is 128 + 8), e2m1 divided by E2M1_SHIFT."""
    if ELEMENT == "int4":
        # Mantissa bits of 128.0.
        if plane < 4:
            moved = words << (16 - 4 * plane)
        else:
            moved = words >> (4 * plane - 16)
        return ((moved & 0xF0000) | 0x43000000).to(tl.float32, bitcast=True)
    else:
        # Sign to the top; the shift back spreads it over bits that the mask clears again.
        moved = (words << (28 - 4 * plane)) >> 6
        return (moved & -2118123520).to(tl.float32, bitcast=True)  # 0x81C00000


@triton.jit
def widen(words, plane: tl.constexpr, scale, dtype: tl.constexpr, ELEMENT: tl.constexpr):
    """Weights of one plane in x's type; e2m1 in bfloat16 divided by LIFT. scale: fp32, broadcasting over words."""
    values = nibbles(words, plane, ELEMENT)
    if ELEMENT == "int4":
        # Exact before the last rounding: 136 has 5 bits and the scale 8.
        return (values * scale + scale * -136.0).to(dtype)
    elif dtype == tl.bfloat16:
        return (values * (scale * (E2M1_SHIFT / LIFT))).to(dtype)
    else:
        return (values * E2M1_SHIFT * scale).to(dtype)


@triton.jit
def load_rows(at, left, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """A tile [R, BLOCK] of which the columns from `left` on are past the end (EVEN: none are): zeros."""
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=(tl.arange(0, BLOCK) < left)[None, :], other=0.0)


@triton.jit
def load_rows_there(at, there, left, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """The same where rows may be absent as well."""
    if EVEN:
        return tl.load(at, mask=there[:, None], other=0.0)
    else:
        return tl.load(at, mask=there[:, None] & (tl.arange(0, BLOCK) < left)[None, :], other=0.0)


@triton.jit
def multiply(
    x,
    x_scale,
    x_rows,  # [M] int64: rows of x and of its scales
    there,  # [M]: the others count as zeros
    x_stride,
    xs_stride,
    w,  # the matrix and its scales
    w_scale,
    w_rows,  # [N] int64
    w_stride,  # of stored elements (words, bytes) of a row
    ws_stride,
    second,  # TWO: how many rows further the second product's rows are
    K,
    TWO: tl.constexpr,
    KIND: tl.constexpr,
    ELEMENT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP: tl.constexpr,
    ONE_SCALE: tl.constexpr,
):
    """x[x_rows] @ w[w_rows]^T, and with TWO the same for w[w_rows + second] (otherwise twice the same): fp32 [M, N], or
    [N, M] with SWAP. EVEN_K: BLOCK_K ("planes": 128 at least) divides K. ONE_SCALE ("group128"): all w_rows have one
    scale."""
    if KIND == "group128":
        first, other = _group128(
            x, x_scale, x_rows, there, x_stride, xs_stride, w, w_scale, w_rows, w_stride, ws_stride, second, K,
            TWO, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, SWAP, ONE_SCALE,
        )  # fmt: skip
    elif KIND == "planes" and ELEMENT == "e2m1" and GROUP == PAIR_PLANE:
        first, other = _planes_of_pairs(
            x, x_rows, there, x_stride, w, w_scale, w_rows, w_stride, ws_stride, second, K,
            TWO, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, SWAP,
        )  # fmt: skip
    elif KIND == "planes":
        first, other = _planes(
            x, x_rows, there, x_stride, w, w_scale, w_rows, w_stride, ws_stride, second, K,
            TWO, ELEMENT, GROUP, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, SWAP,
        )  # fmt: skip
    elif KIND == "mx":
        first, other = _block_scaled(
            x, x_scale, x_rows, there, x_stride, xs_stride, w, w_scale, w_rows, w_stride, ws_stride, second, K,
            TWO, ELEMENT, GROUP, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, SWAP,
        )  # fmt: skip
    else:
        first, other = _flat(
            x, x_rows, there, x_stride, w, w_rows, w_stride, second, K,
            TWO, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, SWAP,
        )  # fmt: skip
        if KIND == "scaled":
            a_scale = over_rows(tl.load(x_scale + x_rows * xs_stride, mask=there, other=0.0), SWAP)
            first = first.to(tl.float32) * a_scale * over_cols(tl.load(w_scale + w_rows * ws_stride), SWAP)
            if TWO:
                scale = over_cols(tl.load(w_scale + (w_rows + second) * ws_stride), SWAP)
                other = other.to(tl.float32) * a_scale * scale
            else:
                other = first
    return first, other


@triton.jit
def _flat(
    x, x_rows, there, x_stride, w, w_rows, w_stride, second, K,
    TWO: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    k = tl.arange(0, BLOCK_K)
    x_at = x + x_rows[:, None] * x_stride + k[None, :]
    w_at = w + w_rows[:, None] * w_stride + k[None, :]
    second_at = w_at + second * w_stride
    if w.dtype.element_ty == tl.int8:
        first = zeros(BLOCK_M, BLOCK_N, tl.int32, SWAP)
    else:
        first = zeros(BLOCK_M, BLOCK_N, tl.float32, SWAP)
    other = first
    for start in range(0, K, BLOCK_K):
        a = load_rows_there(x_at + start, there, K - start, BLOCK_K, EVEN_K)
        b = load_rows(w_at + start, K - start, BLOCK_K, EVEN_K)
        if TWO:
            c = load_rows(second_at + start, K - start, BLOCK_K, EVEN_K)
            other = dot(a, c, other, SWAP)
        first = dot(a, b, first, SWAP)
    return first, other


@triton.jit
def _group128(
    x, x_scale, x_rows, there, x_stride, xs_stride, w, w_scale, w_rows, w_stride, ws_stride, second, K,
    TWO: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, SWAP: tl.constexpr, ONE_SCALE: tl.constexpr,
):  # fmt: skip
    k = tl.arange(0, BLOCK_K)
    x_at = x + x_rows[:, None] * x_stride + k[None, :]
    w_at = w + w_rows[:, None] * w_stride + k[None, :]
    second_at = w_at + second * w_stride
    xs_at = x_scale + x_rows * xs_stride
    if ONE_SCALE:
        row = tl.min(w_rows, axis=0)
        ws_at = w_scale + (row // 128) * ws_stride
        second_ws_at = w_scale + ((row + second) // 128) * ws_stride
    else:
        ws_at = w_scale + (w_rows // 128) * ws_stride
        second_ws_at = w_scale + ((w_rows + second) // 128) * ws_stride
    first = zeros(BLOCK_M, BLOCK_N, tl.float32, SWAP)
    other = first
    # The scales of the next step are on their way while this one is multiplied.
    a_scale, w_scale_now = tl.load(xs_at, mask=there, other=0.0), tl.load(ws_at)
    second_scale_now = tl.load(second_ws_at)
    for start in range(0, K, BLOCK_K):
        group = tl.minimum(start + BLOCK_K, K - 1) // 128
        next_a = tl.load(xs_at + group, mask=there, other=0.0)
        next_w, next_second = tl.load(ws_at + group), tl.load(second_ws_at + group)
        a = load_rows_there(x_at + start, there, K - start, BLOCK_K, EVEN_K)
        b = load_rows(w_at + start, K - start, BLOCK_K, EVEN_K)
        if TWO:
            c = load_rows(second_at + start, K - start, BLOCK_K, EVEN_K)
            product = dot(a, c, zeros(BLOCK_M, BLOCK_N, tl.float32, SWAP), SWAP)
            other += product * _both(a_scale, second_scale_now, SWAP, ONE_SCALE)
        first += dot(a, b, zeros(BLOCK_M, BLOCK_N, tl.float32, SWAP), SWAP) * _both(
            a_scale, w_scale_now, SWAP, ONE_SCALE
        )
        a_scale, w_scale_now, second_scale_now = next_a, next_w, next_second
    return first, other


@triton.jit
def _both(a_scale, w_scale, SWAP: tl.constexpr, ONE_SCALE: tl.constexpr):
    """a_scale [M], w_scale [N] or one -> their product, to broadcast over the accumulator."""
    if ONE_SCALE:
        return over_rows(a_scale * w_scale, SWAP)
    else:
        return over_rows(a_scale, SWAP) * over_cols(w_scale, SWAP)


@triton.jit
def _load_strip(at, left, ALWAYS: tl.constexpr):
    """What belongs to a strip of planes that begins `left` columns before the end: zeros if that is none (ALWAYS: it
    is there)."""
    if ALWAYS:
        return tl.load(at)
    else:
        return tl.load(at, mask=left > 0, other=0.0)


@triton.jit
def _planes(
    x, x_rows, there, x_stride, w, w_scale, w_rows, w_stride, ws_stride, second, K,
    TWO: tl.constexpr, ELEMENT: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    # The strips of a step are asked for together: 64 bytes of a row alone are slow to read.
    STRIPS: tl.constexpr = BLOCK_K // STRIP if BLOCK_K > STRIP else 1
    k = tl.arange(0, PLANE)
    x_at = x + x_rows[:, None] * x_stride + k[None, :]
    w_at = w + w_rows[:, None] * w_stride + k[None, :]
    second_at = w_at + second * w_stride
    ws_at = w_scale + w_rows * ws_stride
    second_ws_at = ws_at + second * ws_stride
    dtype: tl.constexpr = x.dtype.element_ty
    first = zeros(BLOCK_M, BLOCK_N, tl.float32, SWAP)
    other = first
    for step in range(0, K, STRIPS * STRIP):
        for strip in tl.static_range(STRIPS):
            start = step + strip * STRIP
            words = _load_strip(w_at + start // PLANES, K - start, EVEN_K or strip == 0)
            if TWO:
                second_words = _load_strip(second_at + start // PLANES, K - start, EVEN_K or strip == 0)
            for plane in tl.static_range(PLANES):
                column = start + plane * PLANE
                a = load_rows_there(x_at + column, there, K - column, PLANE, EVEN_K)
                if (plane * PLANE) % GROUP == 0:
                    raw = _load_strip(ws_at + column // GROUP, K - start, EVEN_K or strip == 0)
                    scale = decode_scale(raw)[:, None]
                    if TWO:
                        raw = _load_strip(second_ws_at + column // GROUP, K - start, EVEN_K or strip == 0)
                        second_scale = decode_scale(raw)[:, None]
                first = dot(a, widen(words, plane, scale, dtype, ELEMENT), first, SWAP)
                if TWO:
                    other = dot(a, widen(second_words, plane, second_scale, dtype, ELEMENT), other, SWAP)
    if ELEMENT == "e2m1" and dtype == tl.bfloat16:
        first, other = first * LIFT, other * LIFT
    return first, other


@triton.jit
def code_pairs(words, plane: tl.constexpr):
    """Two e2m1 codes of each word as bfloat16, divided by E2M1_SHIFT, in the halves of an int32."""
    codes: tl.constexpr = -2118090304  # 0x81C081C0: sign, lowest exponent bits and highest mantissa bit of both halves
    if plane == 0:
        return (words << 6) & codes
    elif plane == 1:
        return (words << 2) & codes
    elif plane == 2:
        bits = words.to(tl.uint32, bitcast=True)
        return ((bits >> 4) | (bits << 28)).to(tl.int32, bitcast=True) & codes
    else:
        # 0x81808180; the mantissa bits lie apart.
        return (words & -2122284672) | ((words >> 8) & 0x00400040)


@triton.jit
def halves(pairs, dtype: tl.constexpr):
    """The low and the high half of each int32 as a 16-bit float."""
    low = pairs.to(tl.int16).to(dtype, bitcast=True)
    return low, (pairs >> 16).to(tl.int16).to(dtype, bitcast=True)


@triton.jit
def wide_halves(pairs, dtype: tl.constexpr):
    """The same as fp32."""
    if dtype == tl.bfloat16:
        return (pairs << 16).to(tl.float32, bitcast=True), (pairs & HIGH_HALF).to(tl.float32, bitcast=True)
    else:
        low, high = halves(pairs, dtype)
        return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _times(pairs, scales):
    """Products of two bfloat16 by two, in the halves of int32."""
    if INTERPRETED:
        a, b = wide_halves(pairs, tl.bfloat16)
        c, d = wide_halves(scales, tl.bfloat16)
        low, high = a * c, b * d
        return ((low.to(tl.int32, bitcast=True) >> 16) & 0xFFFF) | (high.to(tl.int32, bitcast=True) & HIGH_HALF)
    else:
        # Compilers multiply the halves one by one, and move them for it. Minus zero is added: that changes nothing.
        return tl.inline_asm_elementwise(
            "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }", "=r,r,r",
            [pairs, scales], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def lifted_pairs(words, scales, plane: tl.constexpr):
    """The values of a plane, two of each word as bfloat16 divided by LIFT in the halves of an int32. scales: words of
    four e8m0 each, broadcasting over words."""
    exponent = ((scales + LIFTED_SCALES) >> (8 * plane)) & 0xFF
    return _times(code_pairs(words, plane), tl.broadcast_to(exponent * 0x800080, words.shape))


@triton.jit
def _widened_plane(words, scales, plane: tl.constexpr, dtype: tl.constexpr):
    """words [N, 16], scales [N] of four e8m0 each -> [N, 32]; in bfloat16 divided by LIFT."""
    if dtype == tl.bfloat16:
        low, high = halves(lifted_pairs(words, scales[:, None], plane), tl.bfloat16)
    else:
        scale = decode_scale((scales >> (8 * plane)).to(tl.uint8))[:, None]
        low, high = wide_halves(code_pairs(words, plane), tl.bfloat16)
        low, high = (low * E2M1_SHIFT * scale).to(dtype), (high * E2M1_SHIFT * scale).to(dtype)
    return tl.reshape(tl.join(low, high), (words.shape[0], words.shape[1] * 2))


@triton.jit
def _widened_strip(words, scales, dtype: tl.constexpr):
    """words [N, 16], scales [N] -> [N, 128]."""
    even = tl.join(_widened_plane(words, scales, 0, dtype), _widened_plane(words, scales, 2, dtype))
    odd = tl.join(_widened_plane(words, scales, 1, dtype), _widened_plane(words, scales, 3, dtype))
    planes = tl.permute(tl.join(even, odd), (0, 2, 3, 1))
    return tl.reshape(planes, (words.shape[0], words.shape[1] * 8))


@triton.jit
def _planes_of_pairs(
    x, x_rows, there, x_stride, w, w_scale, w_rows, w_stride, ws_stride, second, K,
    TWO: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    SWAP: tl.constexpr,
):  # fmt: skip
    STRIPS: tl.constexpr = BLOCK_K // STRIP if BLOCK_K > STRIP else 1
    # A whole strip at once where registers are left: wgmma takes it from them, and small blocks have few sums.
    WHOLE: tl.constexpr = SWAP or BLOCK_M == 16
    COLUMNS: tl.constexpr = STRIP if WHOLE else PAIR_PLANE
    x_at = x + x_rows[:, None] * x_stride + tl.arange(0, COLUMNS)[None, :]
    w_at = w + w_rows[:, None] * w_stride + tl.arange(0, PLANE)[None, :]
    second_at = w_at + second * w_stride
    # The scales of a strip are a word: small loads would not be on their way while others are multiplied.
    ws_at = w_scale.to(tl.pointer_type(tl.int32)) + w_rows * (ws_stride // 4)
    second_ws_at = ws_at + second * (ws_stride // 4)
    dtype: tl.constexpr = x.dtype.element_ty
    first = zeros(BLOCK_M, BLOCK_N, tl.float32, SWAP)
    other = first
    for step in range(0, K, STRIPS * STRIP):
        for strip in tl.static_range(STRIPS):
            start = step + strip * STRIP
            words = _load_strip(w_at + start // PLANES, K - start, EVEN_K or strip == 0)
            scales = _load_strip(ws_at + start // STRIP, K - start, EVEN_K or strip == 0)
            if TWO:
                second_words = _load_strip(second_at + start // PLANES, K - start, EVEN_K or strip == 0)
                second_scales = _load_strip(second_ws_at + start // STRIP, K - start, EVEN_K or strip == 0)
            if WHOLE:
                a = load_rows_there(x_at + start, there, K - start, STRIP, EVEN_K)
                if TWO:
                    other = dot(a, _widened_strip(second_words, second_scales, dtype), other, SWAP)
                first = dot(a, _widened_strip(words, scales, dtype), first, SWAP)
            else:
                for plane in tl.static_range(PAIR_PLANES):
                    column = start + plane * PAIR_PLANE
                    a = load_rows_there(x_at + column, there, K - column, PAIR_PLANE, EVEN_K)
                    if TWO:
                        other = dot(a, _widened_plane(second_words, second_scales, plane, dtype), other, SWAP)
                    first = dot(a, _widened_plane(words, scales, plane, dtype), first, SWAP)
    if dtype == tl.bfloat16:
        first, other = first * LIFT, other * LIFT
    return first, other


@triton.jit
def _block_scaled(
    x, x_scale, x_rows, there, x_stride, xs_stride, w, w_scale, w_rows, w_stride, ws_stride, second, K,
    TWO: tl.constexpr, ELEMENT: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    # Two e2m1 to a byte; NVFP4 (groups of 16) has them on both sides.
    X_BYTES: tl.constexpr = BLOCK_K // 2 if GROUP == 16 else BLOCK_K
    if ELEMENT == "e2m1" and GROUP == 32:  # converted eight codes at a time
        W_SIZE: tl.constexpr = BLOCK_K // PLANES
        w, w_stride = w.to(tl.pointer_type(tl.int32)), w_stride // 4
    else:
        W_SIZE: tl.constexpr = BLOCK_K // 2 if ELEMENT == "e2m1" else BLOCK_K
    xk, wk, g = tl.arange(0, X_BYTES), tl.arange(0, W_SIZE), tl.arange(0, BLOCK_K // GROUP)
    x_at = x + x_rows[:, None] * x_stride + xk[None, :]
    w_at = w + w_rows[:, None] * w_stride + wk[None, :]
    xs_at = x_scale + x_rows[:, None] * xs_stride + g[None, :]
    ws_at = w_scale + w_rows[:, None] * ws_stride + g[None, :]
    first = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    other = first
    for start in range(0, K, BLOCK_K):
        # Columns past the end are zeros on both sides, with scales that are finite.
        x_start, w_start, g_start = start * X_BYTES // BLOCK_K, start * W_SIZE // BLOCK_K, start // GROUP
        left, g_left = K - start, tl.cdiv(K, GROUP) - g_start
        x_left, w_left = left * X_BYTES // BLOCK_K, left * W_SIZE // BLOCK_K
        a = load_rows_there(x_at + x_start, there, x_left, X_BYTES, EVEN_K)
        a_scale = load_rows_there(xs_at + g_start, there, g_left, BLOCK_K // GROUP, EVEN_K)
        b = load_rows(w_at + w_start, w_left, W_SIZE, EVEN_K)
        b_scale = load_rows(ws_at + g_start, g_left, BLOCK_K // GROUP, EVEN_K)
        first = _scaled_dot(a, a_scale, b, b_scale, first, ELEMENT, GROUP)
        if TWO:
            c = load_rows(w_at + second * w_stride + w_start, w_left, W_SIZE, EVEN_K)
            c_scale = load_rows(ws_at + second * ws_stride + g_start, g_left, BLOCK_K // GROUP, EVEN_K)
            other = _scaled_dot(a, a_scale, c, c_scale, other, ELEMENT, GROUP)
    if ELEMENT == "e2m1" and GROUP == 32:
        first, other = first * E4M3_OF_E2M1, other * E4M3_OF_E2M1
    if SWAP:
        first, other = tl.trans(first), tl.trans(other)
    return first, other


@triton.jit
def _scaled_dot(a, a_scale, w, w_scale, acc, ELEMENT: tl.constexpr, GROUP: tl.constexpr):
    """acc + a @ w^T with a [M, K] e4m3 or (groups of 16) packed e2m1, w [N, K] e4m3 or packed e2m1."""
    if GROUP == 16:
        return tl.dot_scaled(a, a_scale, "e2m1", tl.trans(w), w_scale, "e2m1", acc)
    elif ELEMENT == "e2m1":
        # There is no instruction that Triton gives for e4m3 by e2m1, but every e2m1 is an e4m3.
        return tl.dot_scaled(a, a_scale, "e4m3", tl.trans(_e4m3_of_e2m1(w)), w_scale, "e4m3", acc)
    else:
        return tl.dot_scaled(a, a_scale, "e4m3", tl.trans(w), w_scale, "e4m3", acc)


@triton.jit
def _bytes_of(words):
    """int32 [N, W] -> uint8 [N, W, 2, 2], the lowest byte first."""
    even = tl.join(words.to(tl.uint8), (words >> 16).to(tl.uint8))
    return tl.join(even, tl.join((words >> 8).to(tl.uint8), (words >> 24).to(tl.uint8)))


@triton.jit
def _e4m3_of_e2m1(words):
    """int32 [N, K / 8] of eight codes -> e4m3 [N, K], divided by E4M3_OF_E2M1: the code in the lowest exponent bits.

    Shifts and masks are those of four codes: compilers do not put instructions on bytes together to such."""
    signs: tl.constexpr = -2139062144  # 0x80808080
    codes: tl.constexpr = 0x1C1C1C1C
    low = ((words << 4) & signs) | ((words << 2) & codes)
    high = (words & signs) | ((words >> 2) & codes)
    both = tl.join(_bytes_of(low), _bytes_of(high))
    return tl.reshape(both, (words.shape[0], words.shape[1] * 8)).to(tl.float8e4nv, bitcast=True)
