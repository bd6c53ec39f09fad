"""Rows of four-bit keys and values: how kernels make them and read them.

A row of D numbers is D / 2 bytes of e2m1 codes, the even column in the low bits, and D / 16 bytes of e4m3 scales, one
for 16 columns (the element and block format of NVFP4). All is uint8 and integer arithmetic, so that GPUs without the
e4m3 type serve it, too.

Reference: `native_fp4.quantize_fp4_rows` and `dequantize_fp4_rows`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.quantize import encode_e2m1

GROUP = 16
LIFT = 256.0
"""What `load_fp4` returns is the stored value divided by this: the scale of scores and of outputs takes it back."""


@triton.jit
def encode_e4m3(values):
    """fp32 from 0 to 448 -> codes of e4m3 (int32), to nearest, ties to the even code."""
    bits = values.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # the difference of the biases, 120, in units of 1/8
    # Below 2^-6 in steps of 2^-9: the sum with 2^23 has no other fraction.
    small = (values * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 15
    return tl.where(values < 0.015625, small, normal)


@triton.jit
def decode_e4m3(codes):
    """Codes of e4m3 without a sign (uint8) -> fp32."""
    return (codes.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def store_fp4(
    rows,  # pointers [ROWS, 1] to element 0 of each row of values
    inside,  # [ROWS, 1]
    codes,  # pointers [ROWS, 1] to byte 0 of each row of codes
    scales,  # pointers [ROWS, 1] to byte 0 of each row of scales
    tensor_scale,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
):
    """Quantize rows of DIM values, divided by `tensor_scale`. The values lie in memory as they shall be stored."""
    group = tl.arange(0, GROUP_BLOCK)[None, :]
    there = inside & (group < DIM // 16)
    col = tl.arange(0, 16)[None, None, :]
    at = rows[:, :, None] + (group * 16)[:, :, None] + col
    values = tl.load(at, mask=there[:, :, None], other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values), axis=2)
    scale = encode_e4m3(tl.minimum(tl.math.div_rn(tl.math.div_rn(largest, 6.0), tensor_scale), 448.0))
    divisor = decode_e4m3(scale) * tensor_scale
    # A group of (nearly) zeros has a scale of zero, and zeros for values.
    quotients = tl.math.div_rn(values, tl.where(divisor > 0.0, divisor, 1.0)[:, :, None])
    quotients = tl.where((divisor > 0.0)[:, :, None], quotients, 0.0)
    low, high = tl.split(tl.reshape(encode_e2m1(quotients), (ROWS, GROUP_BLOCK, 8, 2)))
    byte = tl.arange(0, 8)[None, None, :]
    packed = (low | (high << 4)).to(tl.uint8)
    tl.store(codes[:, :, None] + (group * 8)[:, :, None] + byte, packed, mask=there[:, :, None])
    tl.store(scales + group, scale.to(tl.uint8), mask=there)


@triton.jit
def load_fp4(
    codes,  # byte 0 of the codes of the first row's head
    scales,
    code_rows,  # offsets [N] of the rows in bytes, int64
    scale_rows,
    keep,  # [N]
    DIM: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    N: tl.constexpr,
    DTYPE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Rows of DIM stored values -> their even and their odd columns, each [N, GROUP_BLOCK * 8] of DTYPE, divided by
    LIFT. Exact: a product of an e2m1 and an e4m3 number has six significant bits. Rows that are not `keep` (if MASKED),
    and columns from DIM on, are zeros."""
    group = tl.arange(0, GROUP_BLOCK)
    byte = tl.arange(0, 8)
    at = codes + code_rows[:, None, None] + (group[:, None] * 8 + byte[None, :])[None, :, :]
    scale_at = scales + scale_rows[:, None] + group[None, :]
    if MASKED:
        there = keep[:, None] & (group < DIM // 16)[None, :]
        packed = tl.load(at, mask=there[:, :, None], other=0)
        scale = tl.load(scale_at, mask=there, other=0)
    elif GROUP_BLOCK * 16 > DIM:
        there = (group < DIM // 16)[None, :]
        packed = tl.load(at, mask=there[:, :, None], other=0)
        scale = tl.load(scale_at, mask=there, other=0)
    else:
        packed = tl.load(at)
        scale = tl.load(scale_at)
    # A code in the lowest exponent and highest mantissa bits of an fp32 is its value divided by 2^126, and scales take
    # 2^118 of them back: more would overflow.
    factor = (decode_e4m3(scale) * 3.3230699894622897e35)[:, :, None]
    bits = packed.to(tl.int32)
    even = (((bits << 22) & 0x1C00000) | ((bits << 28) & -2147483648)).to(tl.float32, bitcast=True)
    odd = (((bits << 18) & 0x1C00000) | ((bits << 24) & -2147483648)).to(tl.float32, bitcast=True)
    even = tl.reshape((even * factor).to(DTYPE), (N, GROUP_BLOCK * 8))
    odd = tl.reshape((odd * factor).to(DTYPE), (N, GROUP_BLOCK * 8))
    return even, odd


def group_block(dim: int) -> int:
    """Returns the number of groups of a row of `dim` columns, rounded up to a power of two."""
    return triton.next_power_of_2(dim // GROUP)


def slot_stride(codes: torch.Tensor) -> int:
    """The bytes between slots of codes [S, H, D / 2], in units of 16, or of 8 where D is an odd multiple of 16. Kernels
    multiply by the unit: so they load codes in words, however many heads a slot has, in one form for all of them."""
    unit = 8 if codes.shape[2] % 16 else 16
    assert codes.stride(0) % unit == 0 and codes.stride(1) == codes.shape[2]
    return codes.stride(0) // unit
