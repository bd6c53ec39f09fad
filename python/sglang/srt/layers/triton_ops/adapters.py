"""LoRA adapters of a linear layer, in two launches: A x into scratch (shrink), then B times that added to the layer's
output (expand). Reference: `layers/native_adapters`.

Tokens of several adapters lie mixed in a step. A program has a tile of tokens and takes the adapters of these one after
the other, from the lowest slot to the highest, so nothing is sorted and a CUDA graph serves any mixture. Tiles without
an adapter do nothing. With few tokens, programs share the inner dimension of A, because there would be too few of them
to read A at the memory's speed; their partial sums are added where they are read, always in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from sglang.srt.layers.native_adapters import AdapterWeights

FEW_TOKENS = 64
"""Tokens up to which tiles are small and the inner dimension is divided."""
NONE = 1 << 30
LARGEST_BLOCK_R = 64
SPANS = 8
"""Programs that share the inner dimension of few tokens."""


@triton.jit
def _range_of(slot, NONE: tl.constexpr):
    first = tl.min(tl.where(slot > 0, slot, NONE), axis=0)
    return first, tl.max(slot, axis=0)


@triton.jit(do_not_specialize=["num_tokens", "blocks_of_span"])
def shrink_kernel(
    x,
    a,
    slots,
    ranks,
    low,  # [spans, T, P * R] fp32
    num_tokens,
    K,
    R,
    x_stride,
    blocks_of_span,  # columns of a program, in BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    NONE: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    slot = tl.load(slots + rows, mask=rows < num_tokens, other=0)
    first, last = _range_of(slot, NONE)
    blocks = tl.cdiv(R, BLOCK_R)
    part, block = tl.program_id(1) // blocks, tl.program_id(1) % blocks
    parts = tl.num_programs(1) // blocks
    r = block * BLOCK_R + tl.arange(0, BLOCK_R)
    span = blocks_of_span * BLOCK_K
    begin = tl.program_id(2) * span
    # Only the base addresses are wide: offsets within a tile fit 32 bits, and take half of the registers.
    x_tile = x + tl.program_id(0).to(tl.int64) * BLOCK_M * x_stride
    x_rows = tl.arange(0, BLOCK_M)[:, None] * x_stride
    zero = tl.zeros((), tl.int64)
    total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for s in range(first, last + 1):
        mine = slot == s
        count = tl.sum(mine.to(tl.int32), axis=0)
        rank = tl.load(ranks + s - 1)
        if (count > 0) & (block * BLOCK_R < rank):
            a_tile = a + ((zero + (s - 1)) * parts + part) * R * K
            a_rows = r[None, :] * K
            for start in range(begin, tl.minimum(begin + span, K), BLOCK_K):
                k = start + tl.arange(0, BLOCK_K)
                some = tl.load(x_tile + (x_rows + k[None, :]), mask=mine[:, None] & (k < K)[None, :], other=0.0)
                weight = tl.load(a_tile + (a_rows + k[:, None]), mask=(k < K)[:, None] & (r < rank)[None, :], other=0.0)
                total = tl.dot(some, weight, total)
    width = parts * R
    at = low + (rows.to(tl.int64) + tl.program_id(2) * num_tokens)[:, None] * width + part * R + r[None, :]
    tl.store(at, total, mask=((rows < num_tokens) & (slot > 0))[:, None] & (r < R)[None, :])


@triton.jit(do_not_specialize=["num_tokens", "spans"])
def expand_kernel(
    low,
    b,
    slots,
    ranks,
    parts,
    out,
    num_tokens,
    N,
    R,
    width,  # P * R
    out_stride,
    spans,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    NONE: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    slot = tl.load(slots + rows, mask=rows < num_tokens, other=0)
    first, last = _range_of(slot, NONE)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    part_of = tl.load(parts + n, mask=n < N, other=-1)
    first_part, last_part = tl.min(tl.where(n < N, part_of, NONE), axis=0), tl.max(part_of, axis=0)
    # Only the base addresses are wide: offsets within a tile fit 32 bits, and take half of the registers.
    zero = tl.zeros((), tl.int64)
    low_rows, b_rows = tl.arange(0, BLOCK_M)[:, None] * width, tl.arange(0, BLOCK_N)[None, :] * R
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for s in range(first, last + 1):
        mine = slot == s
        count = tl.sum(mine.to(tl.int32), axis=0)
        rank = tl.load(ranks + s - 1)
        if count > 0:
            b_tile = b + ((zero + (s - 1)) * N + tl.program_id(1) * BLOCK_N) * R
            for part in range(first_part, last_part + 1):
                for start in range(0, rank, BLOCK_R):
                    r = start + tl.arange(0, BLOCK_R)
                    here = mine[:, None] & (r < rank)[None, :]
                    sums = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
                    for span in range(spans):
                        low_tile = low + (zero + span * num_tokens + tl.program_id(0) * BLOCK_M) * width + part * R
                        sums += tl.load(low_tile + (low_rows + r[None, :]), mask=here, other=0.0)
                    weight = tl.load(
                        b_tile + (b_rows + r[:, None]), mask=(r < rank)[:, None] & (part_of == part)[None, :], other=0.0
                    )
                    total = tl.dot(sums.to(weight.dtype), weight, total)
    out_tile = out + tl.program_id(0).to(tl.int64) * BLOCK_M * out_stride
    at = out_tile + (tl.arange(0, BLOCK_M)[:, None] * out_stride + n[None, :])
    store = (slot > 0)[:, None] & (n < N)[None, :]
    before = tl.load(at, mask=store, other=0.0).to(tl.float32)
    tl.store(at, (before + total).to(out.dtype.element_ty), mask=store)


def add_adapters(x: torch.Tensor, out: torch.Tensor, slots: torch.Tensor, weights: AdapterWeights) -> None:
    """Does as the reference. Rows of x and out are contiguous, `weights` too; all are of one 16-bit type."""
    num_tokens, size = x.shape
    _, num_parts, rank, _ = weights.a.shape
    few = num_tokens <= FEW_TOKENS
    block_m, block_k, num_warps = (16, 128, 4) if few else (64, 64, 8)
    block_r = min(LARGEST_BLOCK_R, triton.next_power_of_2(rank))
    blocks_of_span = triton.cdiv(size, block_k * (SPANS if few else 1))
    spans = triton.cdiv(size, block_k * blocks_of_span)
    low = torch.empty((spans, num_tokens, num_parts * rank), dtype=torch.float32, device=x.device)
    tiles = triton.cdiv(num_tokens, block_m)
    shrink_kernel[(tiles, num_parts * triton.cdiv(rank, block_r), spans)](
        x, weights.a, slots, weights.ranks, low, num_tokens, size, rank, x.stride(0),
        blocks_of_span, BLOCK_M=block_m, BLOCK_K=block_k, BLOCK_R=block_r, NONE=NONE, num_warps=num_warps, num_stages=3,
    )  # fmt: skip
    num_cols, block = out.shape[1], 16 if few else 32
    expand_kernel[(triton.cdiv(num_tokens, block), triton.cdiv(num_cols, block))](
        low, weights.b, slots, weights.ranks, weights.parts, out, num_tokens, num_cols, rank, num_parts * rank,
        out.stride(0), spans, BLOCK_M=block, BLOCK_N=block, BLOCK_R=block_r, NONE=NONE, num_warps=4, num_stages=1,
    )  # fmt: skip
