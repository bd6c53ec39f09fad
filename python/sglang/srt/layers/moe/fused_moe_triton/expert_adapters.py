"""LoRA adapters of experts, in two launches over pairs grouped by expert: A x into scratch (shrink), then B times that,
added to the product's output (expand). Reference: `layers/native_adapters`.

A program has a block of pairs of one expert, and takes the adapters of their tokens one after the other, from the
lowest slot to the highest: slot and expert are one axis, without sorting pairs by it. So a CUDA graph serves any
mixture of adapters, and blocks whose tokens have none do nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sglang.srt.layers.moe.fused_moe_triton.align import align

if TYPE_CHECKING:
    from sglang.srt.layers.native_adapters import ExpertAdapterWeights

FEW_PAIRS = 512
"""Pairs up to which blocks are small and programs share the inner dimension."""
NONE = 1 << 30
LARGEST_BLOCK_R = 64
LARGEST_EXPAND_R = 32
"""With more, registers spill: the addresses of pairs are wide."""
SPANS = 4
"""Programs that share the inner dimension of few pairs."""


@triton.jit
def _pairs_of_block(sorted_pairs, slots, num_pairs, top_k, BLOCK_M: tl.constexpr, NONE: tl.constexpr):
    """The block's pairs, whether they are there, the slots of their tokens' adapters, and the range of those."""
    pairs = tl.load(sorted_pairs + tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))
    there = pairs < num_pairs
    slot = tl.load(slots + pairs // top_k, mask=there, other=0)
    first = tl.min(tl.where(slot > 0, slot, NONE), axis=0)
    return pairs.to(tl.int64), slot, first, tl.max(slot, axis=0)


@triton.jit(do_not_specialize=["num_pairs", "top_k", "pairs_of_row", "blocks_of_span"])
def shrink_pairs_kernel(
    x,  # [pairs / pairs_of_row, K]
    a,  # [S, E, P, R, K]
    slots,
    ranks,
    low,  # [spans, pairs, P * R] fp32
    sorted_pairs,
    block_expert,
    num_blocks,
    num_pairs,
    top_k,
    pairs_of_row,
    K,
    R,
    x_stride,
    slot_stride,
    expert_stride,
    blocks_of_span,  # columns of a program, in BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    NONE: tl.constexpr,
):
    if tl.program_id(0) < tl.load(num_blocks):
        pairs, slot, first, last = _pairs_of_block(sorted_pairs, slots, num_pairs, top_k, BLOCK_M, NONE)
        expert = tl.load(block_expert + tl.program_id(0)).to(tl.int64)
        blocks = tl.cdiv(R, BLOCK_R)
        part, block = tl.program_id(1) // blocks, tl.program_id(1) % blocks
        r = block * BLOCK_R + tl.arange(0, BLOCK_R)
        span = blocks_of_span * BLOCK_K
        begin = tl.program_id(2) * span
        x_rows = x + (pairs // pairs_of_row)[:, None] * x_stride
        zero = tl.zeros((), tl.int64)
        total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for s in range(first, last + 1):
            mine = slot == s
            count = tl.sum(mine.to(tl.int32), axis=0)
            rank = tl.load(ranks + s - 1)
            if (count > 0) & (block * BLOCK_R < rank):
                a_tile = a + (zero + (s - 1)) * slot_stride + expert * expert_stride + part * R * K
                for start in range(begin, tl.minimum(begin + span, K), BLOCK_K):
                    k = start + tl.arange(0, BLOCK_K)
                    some = tl.load(x_rows + k[None, :], mask=mine[:, None] & (k < K)[None, :], other=0.0)
                    weight = tl.load(
                        a_tile + (r[None, :] * K + k[:, None]), mask=(k < K)[:, None] & (r < rank)[None, :], other=0.0
                    )
                    total = tl.dot(some, weight, total)
        width = (tl.num_programs(1) // blocks) * R
        at = low + (pairs + tl.program_id(2) * num_pairs)[:, None] * width + part * R + r[None, :]
        tl.store(at, total, mask=(slot > 0)[:, None] & (r < R)[None, :])


@triton.jit(do_not_specialize=["num_pairs", "top_k", "spans"])
def expand_pairs_kernel(
    low,
    b,  # [S, E, N, R]
    slots,
    ranks,
    parts,
    out,  # [pairs, N]
    sorted_pairs,
    block_expert,
    num_blocks,
    num_pairs,
    top_k,
    N,
    R,
    width,  # P * R
    out_stride,
    slot_stride,
    expert_stride,
    spans,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    NONE: tl.constexpr,
):
    if tl.program_id(0) < tl.load(num_blocks):
        pairs, slot, first, last = _pairs_of_block(sorted_pairs, slots, num_pairs, top_k, BLOCK_M, NONE)
        expert = tl.load(block_expert + tl.program_id(0)).to(tl.int64)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        part_of = tl.load(parts + n, mask=n < N, other=-1)
        first_part, last_part = tl.min(tl.where(n < N, part_of, NONE), axis=0), tl.max(part_of, axis=0)
        zero = tl.zeros((), tl.int64)
        b_rows = tl.arange(0, BLOCK_N)[None, :] * R
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for s in range(first, last + 1):
            mine = slot == s
            count = tl.sum(mine.to(tl.int32), axis=0)
            rank = tl.load(ranks + s - 1)
            if count > 0:
                b_tile = b + (zero + (s - 1)) * slot_stride + expert * expert_stride + tl.program_id(1) * BLOCK_N * R
                for part in range(first_part, last_part + 1):
                    for start in range(0, rank, BLOCK_R):
                        r = start + tl.arange(0, BLOCK_R)
                        here = mine[:, None] & (r < rank)[None, :]
                        sums = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
                        for span in range(spans):
                            low_rows = low + (pairs + span * num_pairs)[:, None] * width + part * R
                            sums += tl.load(low_rows + r[None, :], mask=here, other=0.0)
                        weight = tl.load(
                            b_tile + (b_rows + r[:, None]),
                            mask=(r < rank)[:, None] & (part_of == part)[None, :],
                            other=0.0,
                        )
                        total = tl.dot(sums.to(weight.dtype), weight, total)
        at = out + pairs[:, None] * out_stride + n[None, :]
        store = (slot > 0)[:, None] & (n < N)[None, :]
        before = tl.load(at, mask=store, other=0.0).to(tl.float32)
        tl.store(at, (before + total).to(out.dtype.element_ty), mask=store)


def add_expert_adapters(
    x: torch.Tensor, out: torch.Tensor, slots: torch.Tensor, ids: torch.Tensor, weights: ExpertAdapterWeights
) -> None:
    """Does as the reference. Rows of x and out are contiguous, `weights` and ids too; x, out and weights are of one
    16-bit type."""
    num_pairs, top_k, size = ids.numel(), ids.shape[1], x.shape[1]
    if not num_pairs:
        return
    num_parts, rank = weights.a.shape[2:4]
    few = num_pairs <= FEW_PAIRS
    block_m, block_k = (16, 128) if few else (32, 64)
    block_r = min(LARGEST_BLOCK_R, triton.next_power_of_2(rank))
    blocks_of_span = triton.cdiv(size, block_k * (SPANS if few else 1))
    spans = triton.cdiv(size, block_k * blocks_of_span)
    low = torch.empty((spans, num_pairs, num_parts * rank), dtype=torch.float32, device=x.device)
    blocks = align(ids, weights.num_experts, block_m)
    grouped = blocks.sorted_pairs, blocks.block_expert, blocks.num_blocks
    shrink_pairs_kernel[(blocks.max_blocks, num_parts * triton.cdiv(rank, block_r), spans)](
        x, weights.a, slots, weights.ranks, low, *grouped, num_pairs, top_k, num_pairs // len(x), size, rank,
        x.stride(0), weights.a.stride(0), _expert_stride(weights.a), blocks_of_span,
        BLOCK_M=block_m, BLOCK_K=block_k, BLOCK_R=block_r, NONE=NONE, num_warps=4, num_stages=3,
    )  # fmt: skip
    num_cols, block_n = out.shape[1], 16 if few else 32
    expand_pairs_kernel[(blocks.max_blocks, triton.cdiv(num_cols, block_n))](
        low, weights.b, slots, weights.ranks, weights.parts, out, *grouped, num_pairs, top_k, num_cols, rank,
        num_parts * rank, out.stride(0), weights.b.stride(0), _expert_stride(weights.b), spans,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_R=min(LARGEST_EXPAND_R, block_r), NONE=NONE, num_warps=4, num_stages=1,
    )  # fmt: skip


def _expert_stride(side: torch.Tensor) -> int:
    """Returns the distance between experts; 0 where they share A or B."""
    return side.stride(1) if side.shape[1] > 1 else 0
