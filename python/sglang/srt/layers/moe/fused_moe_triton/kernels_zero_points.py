"""The kernels of `kernels` and `kernels_few` for int4 weights with zero points: a scale is a word that holds both
(`quantization/zero_points.py`). Reference: `ExpertWeights.dequantized`."""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.srt.layers.moe.fused_moe_triton import kernels, kernels_few
from sglang.srt.layers.triton_ops import scaled_dot, streamed_dot
from sglang.srt.layers.triton_ops.kernel_variant import with_functions
from sglang.srt.layers.triton_ops.scaled_dot import PLANE, PLANES, STRIP, nibbles
from sglang.srt.layers.triton_ops.streamed_dot import _raw_scale

SCALE_RANGE: tl.constexpr = tl.constexpr(2.0**97)


@triton.jit
def decode_words(words):
    """Words -> (scale, offset) in fp32: a weight is (128 + its code) * scale + offset. Exact: the scale has 8 bits, and
    so has 128 + a zero point."""
    bits = (words.to(tl.int32) << 12) & 0xFFF0000
    scale = bits.to(tl.float32, bitcast=True) * SCALE_RANGE
    zero = ((words & 15).to(tl.int32) << 16) | 0x43000000  # mantissa bits of 128.0
    return scale, scale * -zero.to(tl.float32, bitcast=True)


@triton.jit
def as_stored(words):
    return words


@triton.jit
def widen(words, plane: tl.constexpr, scale_words, dtype: tl.constexpr, ELEMENT: tl.constexpr):
    """Weights of one plane in x's type."""
    scale, offset = decode_words(scale_words)
    return (nibbles(words, plane, ELEMENT) * scale + offset).to(dtype)


@triton.jit
def add_planes(
    total, x, factor, there, w, w_scale, rows, w_stride, ws_stride, K, start,
    ELEMENT: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, W: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """As `streamed_dot._add_planes`."""
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
            scale, offset = decode_words(_raw_scale(w_scale, row, ws_stride, group, there, num_groups))
        x_inside = there
        if not EVEN_K:
            x_inside = there & (column < K)
        a = tl.load(x + column, mask=x_inside, other=0.0).to(tl.float32) * factor
        total += (nibbles(words, plane, ELEMENT) * scale + offset) * a
    return total


_planes = with_functions(scaled_dot._planes, __name__, decode_scale=as_stored, widen=widen)
_multiply = with_functions(scaled_dot.multiply, __name__, _planes=_planes)
_add_product = with_functions(streamed_dot.add_product, __name__, _add_planes=add_planes)

gate_up_kernel = with_functions(kernels.gate_up_kernel, __name__, multiply=_multiply)
down_kernel = with_functions(kernels.down_kernel, __name__, multiply=_multiply)
gate_up_pairs_kernel = with_functions(kernels_few.gate_up_pairs_kernel, __name__, add_product=_add_product)
down_sum_kernel = with_functions(kernels_few.down_sum_kernel, __name__, add_product=_add_product)
