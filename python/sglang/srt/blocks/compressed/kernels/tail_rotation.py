"""Rotary embedding of the last dims of every head, with the norms and the store where entries are made. References:
`reference.tail_rotation` and `reference.shared_kv_norm_rope_store`.

Neighbouring dims rotate together, so heads are read as pairs of dims and written as they were read: a thread has both
numbers of a pair, and no other thread has them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops import pdl

ELEMENTS_A_THREAD = 16
"""At least: with fewer, several warps would hold the same numbers, which one could write before another reads them."""

FEW_TOKENS = 32
HEADS_OF_FEW, HEADS_OF_MANY = 1, 4
"""Heads of a program: one where there are few tokens, for parallelism; with eight it would spill registers."""
HEADS_OF_TAILS = 8
"""Heads of a program that rotates their tails alone."""


@triton.jit
def rotated(first, second, cos, sin):
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def normed_and_turned(values, weight, cos_sin_row, eps, DIM: tl.constexpr, ROT: tl.constexpr, dtype: tl.constexpr):
    """values [H, DIM] fp32 are normed, times weight [DIM], and rounded to dtype; then the last ROT dims rotate by the
    row [ROT] of cosines and sines. -> [H, DIM] in dtype."""
    normed = values * tl.rsqrt(tl.sum(values * values, axis=1) / DIM + eps)[:, None] * weight[None, :]
    first, second = tl.split(tl.reshape(normed.to(dtype).to(tl.float32), (values.shape[0], DIM // 2, 2)))
    pair = tl.arange(0, DIM // 2) - (DIM - ROT) // 2
    cos = tl.load(cos_sin_row + pair, mask=pair >= 0, other=1.0)[None, :]
    sin = tl.load(cos_sin_row + ROT // 2 + pair, mask=pair >= 0, other=0.0)[None, :]
    first, second = rotated(first, second, cos, sin)
    return tl.reshape(tl.join(first, second), values.shape).to(dtype)


@triton.jit
def shared_kv_store_kernel(
    q,  # [T, Q_HEADS, DIM], in place
    kv,  # [T, DIM]
    positions,  # [T]
    cos_sin,  # [max_pos, ROT] fp32
    weight,  # [DIM]
    cache,  # [S, DIM]
    out_cache_loc,  # [T]
    kv_stride,
    slot_stride,
    eps,
    Q_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROT: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token, block): block 0 the key that is the value too, the others HEADS query heads each."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    cols = tl.arange(0, DIM)
    dtype: tl.constexpr = q.dtype.element_ty
    norm_weight = tl.load(weight + cols).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    cos_sin_row = cos_sin + tl.load(positions + token) * ROT
    if block == 0:
        row = tl.load(kv + token * kv_stride + cols).to(tl.float32)[None, :]
        entry = normed_and_turned(row, norm_weight, cos_sin_row, eps, DIM, ROT, dtype)
        slot = tl.load(out_cache_loc + token).to(tl.int64)
        tl.store(cache + slot * slot_stride + cols[None, :], entry.to(cache.dtype.element_ty))
    else:
        head = (block - 1) * HEADS + tl.arange(0, HEADS)
        at = q + (token * Q_HEADS + head[:, None]) * DIM + cols[None, :]
        mask = (head < Q_HEADS)[:, None]
        heads = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        ones = tl.full((DIM,), 1.0, tl.float32)
        tl.store(at, normed_and_turned(heads, ones, cos_sin_row, eps, DIM, ROT, dtype), mask=mask)


@triton.jit
def tail_rotation_kernel(
    x,  # [T, NUM_HEADS, dim], in place
    positions,  # [T]
    cos_sin,  # [max_pos, ROT] fp32
    dim,
    NUM_HEADS: tl.constexpr,
    ROT: tl.constexpr,
    INVERSE: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token, HEADS heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    cols = tl.arange(0, ROT)
    pair = tl.arange(0, ROT // 2)
    mask = (head < NUM_HEADS)[:, None]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    cos_sin_row = cos_sin + tl.load(positions + token) * ROT
    cos = tl.load(cos_sin_row + pair)[None, :]
    sin = tl.load(cos_sin_row + ROT // 2 + pair)[None, :]
    if INVERSE:
        sin = -sin
    at = x + (token * NUM_HEADS + head[:, None]) * dim + dim - ROT + cols[None, :]
    tail = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    first, second = tl.split(tl.reshape(tail, (HEADS, ROT // 2, 2)))
    first, second = rotated(first, second, cos, sin)
    turned = tl.reshape(tl.join(first, second), (HEADS, ROT))
    tl.store(at, turned.to(x.dtype.element_ty), mask=mask)


def launch_constants(columns: int, heads: int) -> dict[str, int]:
    """Heads and warps of a program that has `columns` numbers of each."""
    return {"HEADS": heads, "num_warps": max(1, min(4, heads * columns // (32 * ELEMENTS_A_THREAD)))}


def shared_kv_norm_rope_store(
    q: torch.Tensor,
    kv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cache: torch.Tensor,
    out_cache_loc: torch.Tensor,
) -> torch.Tensor:
    """Does as the reference. q contiguous, kv's row stride free; the head dim and the rotary dims are powers of two."""
    num_tokens, num_heads, dim = q.shape
    if num_tokens == 0:
        return q
    heads = HEADS_OF_FEW if num_tokens <= FEW_TOKENS else HEADS_OF_MANY
    shared_kv_store_kernel[(num_tokens, 1 + triton.cdiv(num_heads, heads))](
        q, kv, positions, cos_sin, weight, cache, out_cache_loc, kv.stride(0), cache.stride(0), eps,
        Q_HEADS=num_heads, DIM=dim, ROT=cos_sin.shape[1], **launch_constants(dim, heads), **pdl.options(),
    )  # fmt: skip
    return q


def tail_rotation(
    x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, inverse: bool = False
) -> torch.Tensor:
    """Does as the reference. x contiguous, the rotary dims a power of two."""
    num_tokens, num_heads, dim = x.shape
    if num_tokens == 0:
        return x
    tail_rotation_kernel[(num_tokens, triton.cdiv(num_heads, HEADS_OF_TAILS))](
        x, positions, cos_sin, dim, NUM_HEADS=num_heads, ROT=cos_sin.shape[1], INVERSE=inverse,
        **launch_constants(cos_sin.shape[1], HEADS_OF_TAILS), **pdl.options(),
    )  # fmt: skip
    return x
