"""Records of latents (`plan.latent_record`): how kernels make them and read them.

Every number times its scale is exact in float16, in which kernels multiply it: for e4m3 the conversion is one
instruction, and a code of e2m1 becomes a float16 by moving its bits. Neighbouring columns are read together, e4m3
numbers as 16 bits and codes as a byte, and are multiplied apart, as even and odd columns.

Reference: `native_latent_records`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops import pdl
from sglang.srt.layers.triton_ops.quantize import encode_e2m1

if TYPE_CHECKING:
    from sglang.srt.plan.latent_record import LatentRecord

LAUNCH = {"num_warps": 4}


@triton.jit
def encode_high_byte(values):
    """fp32 from 0 to 448 -> high bytes of float16 (int32), to nearest, ties to the even one."""
    bits = values.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 896  # the difference of the biases, 112, in units of 1/8
    # Below 2^-14 in steps of 2^-17: the sum with 2^23 has no other fraction.
    small = (values * 131072.0 + 8388608.0).to(tl.int32, bitcast=True) & 15
    return tl.where(values < 0.00006103515625, small, normal)


@triton.jit
def high_byte(codes):
    """High bytes of float16 (int32) -> float16."""
    return (codes << 7).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def load_record(
    numbers,  # byte 0 of the cache: as int16 for 8 bits, as uint8 for 4
    scales,  # byte 0 of the cache, as uint8
    slots,  # [N] int64
    keep,  # [N]
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    SCALES_AT: tl.constexpr,
    SIZE: tl.constexpr,
    N: tl.constexpr,
):
    """Records at `slots` -> even columns and odd ones, float16 [N, columns of GROUP_BLOCK groups / 2]; columns from
    those of GROUPS on, and records that are not `keep`, are zeros."""
    PAIRS: tl.constexpr = 32 if BITS == 8 else 8
    # Kernels multiply by a number of which the compiler knows that 16 bytes divide it.
    ROW: tl.constexpr = SIZE // 2 if BITS == 8 else SIZE
    group = tl.arange(0, GROUP_BLOCK)
    pair = tl.arange(0, PAIRS)
    at = numbers + (slots * ROW)[:, None, None] + (group[:, None] * PAIRS + pair[None, :])[None, :, :]
    scale_at = scales + (slots * SIZE)[:, None] + SCALES_AT + group[None, :]
    there = keep[:, None]
    if GROUP_BLOCK > GROUPS:
        there = there & (group < GROUPS)[None, :]
    bits = tl.load(at, mask=there[:, :, None], other=0)
    scale = tl.load(scale_at, mask=there, other=112).to(tl.int32)
    if BITS == 8:
        factor = ((scale - 112) << 10).to(tl.int16).to(tl.float16, bitcast=True)[:, :, None]
        even = (bits & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16) * factor
        odd = ((bits >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16) * factor
    else:
        factor = high_byte(scale)[:, :, None]
        # The bits of a code as the highest of a float16's mantissa and the lowest of its exponent are its value times
        # 2^-14, which is taken back first: the product with a small scale would underflow.
        bits = bits.to(tl.int16)
        even = (((bits << 9) & 0x0E00) | ((bits << 12) & -32768)).to(tl.int16).to(tl.float16, bitcast=True)
        odd = (((bits << 5) & 0x0E00) | ((bits << 8) & -32768)).to(tl.int16).to(tl.float16, bitcast=True)
        stretch = tl.full((), 16384.0, tl.float16)
        even = (even * stretch) * factor
        odd = (odd * stretch) * factor
    return tl.reshape(even, (N, GROUP_BLOCK * PAIRS)), tl.reshape(odd, (N, GROUP_BLOCK * PAIRS))


@triton.jit(do_not_specialize=["entry_stride"], do_not_specialize_on_alignment=["out_cache_loc"])
def latent_record_store_kernel(
    entries,  # [T, RANK + ROPE]
    out,  # [S, SIZE] uint8
    numbers,  # the same bytes as e4m3
    rotary,  # the same bytes as bfloat16
    out_cache_loc,  # [T]
    entry_stride,
    outer,
    BITS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    ROPE_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program: one token."""
    token = tl.program_id(0).to(tl.int64)
    GROUP: tl.constexpr = 64 if BITS == 8 else 16
    group = tl.arange(0, GROUP_BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(out_cache_loc + token).to(tl.int64)
    if slot < 0:
        return
    row = entries + token * entry_stride
    to = out + slot * SIZE
    there = group < GROUPS
    cols = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = tl.load(row + cols, mask=cols < RANK, other=0.0).to(tl.float32)
    values = tl.math.div_rn(values, outer)
    most = tl.max(tl.abs(values), 1)
    if BITS == 8:
        # Of 1.m * 2^e the mantissa carries into the exponent where it is above that of 448, which is 1.75 * 2^8.
        exponent = ((most.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 135
        exponent = tl.minimum(tl.maximum(exponent, -14), 7)
        shrink = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
        stored = tl.minimum(tl.maximum(values * shrink[:, None], -448.0), 448.0)
        tl.store(numbers + slot * SIZE + cols, stored.to(tl.float8e4nv), mask=there[:, None])
        tl.store(to + SCALES_AT + group, (exponent + 127).to(tl.uint8), mask=there)
    else:
        scale = encode_high_byte(tl.minimum(tl.math.div_rn(most, 6.0), 448.0))
        divisor = high_byte(scale).to(tl.float32)
        # A group of (nearly) zeros has a scale of zero, and zeros for values.
        quotients = tl.math.div_rn(values, tl.where(divisor > 0.0, divisor, 1.0)[:, None])
        quotients = tl.where((divisor > 0.0)[:, None], quotients, 0.0)
        low, high = tl.split(tl.reshape(encode_e2m1(quotients), (GROUP_BLOCK, 8, 2)))
        at = group[:, None] * 8 + tl.arange(0, 8)[None, :]
        tl.store(to + at, (low | (high << 4)).to(tl.uint8), mask=there[:, None])
        tl.store(to + SCALES_AT + group, scale.to(tl.uint8), mask=there)
    if ROPE > 0:
        rope = tl.arange(0, ROPE)
        tl.store(rotary + slot * (SIZE // 2) + ROPE_AT // 2 + rope, tl.load(row + RANK + rope).to(tl.bfloat16))


def record_constants(record: LatentRecord) -> dict[str, int]:
    """Returns the constants by which kernels read records."""
    return {
        "BITS": record.bits,
        "GROUPS": record.groups,
        "GROUP_BLOCK": triton.next_power_of_2(record.groups),
        "SCALES_AT": record.scales_at,
        "SIZE": record.size,
    }


def check_records(cache: torch.Tensor, record: LatentRecord) -> None:
    """Raises ValueError for a cache whose records do not lie one behind the other."""
    if cache.dtype != torch.uint8 or cache.shape[-1] != record.size or cache.stride(0) != record.size:
        raise ValueError(f"records lie {record.size} bytes apart, not {cache.stride(0)} of {cache.dtype}")


def latent_record_store(
    entries: torch.Tensor, cache: torch.Tensor, out_cache_loc: torch.Tensor, record: LatentRecord, scale: float = 1.0
) -> None:
    """Stores entries [T, rank + rope] (row stride free) as records in cache [S, 1, size] uint8, with contiguous slots,
    at out_cache_loc [T], skipping negative places. The first `rank` columns are divided by `scale`."""
    check_records(cache, record)
    if len(entries):
        latent_record_store_kernel[(len(entries),)](
            entries, cache, cache.view(torch.float8_e4m3fn), cache.view(torch.bfloat16), out_cache_loc,
            entries.stride(0), float(scale), RANK=record.rank, ROPE=record.rope, ROPE_AT=record.rope_at,
            **record_constants(record), **LAUNCH, **pdl.options(),
        )  # fmt: skip
