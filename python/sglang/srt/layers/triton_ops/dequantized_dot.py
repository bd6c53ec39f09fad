"""As `scaled_dot.multiply` for weights of 8 bits (int8, e4m3) beside activations x of 16 bits, to whose type they are
widened in registers. KIND says how their scales lie:

  "scaled"    one a row
  "group128"  one for 128 x 128
  "mx"        one for a group of columns of a row

Codes are exact in 16 bits. Scales of rows and of blocks multiply sums; those of groups multiply the weights, which are
then rounded. Reference: `quantization.reference.dequantize`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.scaled_dot import decode_scale, dot, load_rows, load_rows_there, over_cols, zeros


@triton.jit
def multiply(
    x, x_scale, x_rows, there, x_stride, xs_stride, w, w_scale, w_rows, w_stride, ws_stride, second, K,
    TWO: tl.constexpr, KIND: tl.constexpr, ELEMENT: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr, ONE_SCALE: tl.constexpr,
):  # fmt: skip
    """The parameters of `scaled_dot.multiply`; nothing is read of `x_scale`."""
    dtype: tl.constexpr = x.dtype.element_ty
    GROUPS: tl.constexpr = BLOCK_K // GROUP if KIND == "mx" and BLOCK_K > GROUP else 1
    k, g = tl.arange(0, BLOCK_K), tl.arange(0, GROUPS)
    x_at = x + x_rows[:, None] * x_stride + k[None, :]
    w_at = w + w_rows[:, None] * w_stride + k[None, :]
    first = zeros(BLOCK_M, BLOCK_N, tl.float32, SWAP)
    other = first
    for start in range(0, K, BLOCK_K):
        left = K - start
        a = load_rows_there(x_at + start, there, left, BLOCK_K, EVEN_K)
        b = load_rows(w_at + start, left, BLOCK_K, EVEN_K)
        if TWO:
            c = load_rows(w_at + second * w_stride + start, left, BLOCK_K, EVEN_K)
        if KIND == "mx":
            group = start // GROUP
            ws_at = w_scale + w_rows[:, None] * ws_stride + group + g[None, :]
            groups_left = tl.cdiv(K, GROUP) - group
            first = dot(a, _in_groups(b, load_rows(ws_at, groups_left, GROUPS, EVEN_K), dtype), first, SWAP)
            if TWO:
                scale = load_rows(ws_at + second * ws_stride, groups_left, GROUPS, EVEN_K)
                other = dot(a, _in_groups(c, scale, dtype), other, SWAP)
        elif KIND == "group128":
            ws_at = w_scale + start // 128
            scale = over_cols(tl.load(ws_at + (w_rows // 128) * ws_stride), SWAP)
            first += scale * dot(a, b.to(dtype), zeros(BLOCK_M, BLOCK_N, tl.float32, SWAP), SWAP)
            if TWO:
                scale = over_cols(tl.load(ws_at + ((w_rows + second) // 128) * ws_stride), SWAP)
                other += scale * dot(a, c.to(dtype), zeros(BLOCK_M, BLOCK_N, tl.float32, SWAP), SWAP)
        else:
            first = dot(a, b.to(dtype), first, SWAP)
            if TWO:
                other = dot(a, c.to(dtype), other, SWAP)
    if KIND == "scaled":
        first *= over_cols(tl.load(w_scale + w_rows * ws_stride), SWAP)
        if TWO:
            other *= over_cols(tl.load(w_scale + (w_rows + second) * ws_stride), SWAP)
    return first, other


@triton.jit
def _in_groups(codes, scales, dtype: tl.constexpr):
    """Codes [N, K] and their scales [N, G] -> weights [N, K] in x's type, rounded once."""
    N: tl.constexpr = codes.shape[0]
    K: tl.constexpr = codes.shape[1]
    G: tl.constexpr = scales.shape[1]
    grouped = tl.reshape(codes.to(tl.float32), (N, G, K // G))
    return tl.reshape(grouped * decode_scale(scales)[:, :, None], (N, K)).to(dtype)
