"""LoRA adapters of experts, in two launches a product: A x into scratch (shrink), then B times that, added to the
product's output (expand). Reference: `layers/native_adapters`.

Pairs of a token and an expert are ordered by (adapter, expert) once a layer, for both products, and cut into chunks. A
program has a chunk of one adapter and one expert, so a CUDA graph serves any mixture of adapters: it has as many
programs as there may be chunks, and those without one end at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sglang.srt.layers.native_adapters import ExpertAdapterKernels
from sglang.srt.layers.triton_ops import pdl
from sglang.srt.layers.triton_ops.adapters import sum_of_spans

if TYPE_CHECKING:
    from sglang.srt.layers.native_adapters import ExpertAdapterWeights

FEW_PAIRS = 4096
"""Pairs up to which chunks are short, and one launch orders them by comparing each with all others."""
NONE = 1 << 30
"""The key of pairs without an adapter or without an expert: behind all others."""
SHRINK_R, EXPAND_R = 64, 32
"""Most rows of A, and columns of B, that a program has at once."""
BLOCK_K = 128
MOST_SPANS = 16


@dataclass(frozen=True, slots=True)
class PairChunks:
    """Pairs by adapter and expert. order [pairs] int32: the pairs; keys: of each place in the order its slot counted
    from 0, times `num_experts`, plus its expert, or NONE; chunks [C] int32: places where a chunk begins, -1: no chunk.
    A chunk ends with its key, or after `rows` pairs."""

    order: torch.Tensor
    keys: torch.Tensor
    chunks: torch.Tensor
    rows: int
    num_experts: int


@triton.jit
def _keys(slots, ids, at, num_pairs, top_k, num_experts, NONE: tl.constexpr):
    slot = tl.load(slots + at // top_k, mask=at < num_pairs, other=0)
    expert = tl.load(ids + at, mask=at < num_pairs, other=-1)
    return tl.where((slot > 0) & (expert >= 0), (slot - 1) * num_experts + expert, NONE)


@triton.jit(do_not_specialize=["num_pairs", "top_k", "num_experts"])
def order_pairs_kernel(
    slots,
    ids,
    order,
    keys,
    chunks,
    num_pairs,
    top_k,
    num_experts,
    BLOCK: tl.constexpr,
    OTHERS: tl.constexpr,
    ROWS: tl.constexpr,
    NONE: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = _keys(slots, ids, at, num_pairs, top_k, num_experts, NONE)
    before, within = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_pairs, OTHERS):
        other_at = start + tl.arange(0, OTHERS)
        other = _keys(slots, ids, other_at, num_pairs, top_k, num_experts, NONE)
        before += tl.sum((other[None, :] < key[:, None]).to(tl.int32), axis=1)
        same = (other[None, :] == key[:, None]) & (other_at[None, :] < at[:, None])
        within += tl.sum(same.to(tl.int32), axis=1)
    place, here = before + within, at < num_pairs
    tl.store(order + place, at, mask=here)
    tl.store(keys + place, key, mask=here)
    tl.store(chunks + place, tl.where((key < NONE) & (within % ROWS == 0), place, -1), mask=here)


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "pairs_of_row"])
def shrink_pairs_kernel(
    x,  # [pairs / pairs_of_row, K]
    a,  # [S, E, P, R, K]
    order,
    keys,
    chunks,
    ranks,
    low,  # [spans, pairs, P * R] fp32, by place in the order
    num_pairs,
    num_experts,
    pairs_of_row,
    K,
    R,
    x_stride,
    slot_stride,
    expert_stride,
    SPAN: tl.constexpr,  # columns of a program
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    first = tl.load(chunks + tl.program_id(0))
    if first >= 0:
        key = tl.load(keys + first)
        rank = tl.load(ranks + key // num_experts)
        blocks = tl.cdiv(R, BLOCK_R)
        part, block = tl.program_id(1) // blocks, tl.program_id(1) % blocks
        parts = tl.num_programs(1) // blocks
        if block * BLOCK_R < rank:
            place = first + tl.arange(0, BLOCK_M)
            here = tl.load(keys + place, mask=place < num_pairs, other=-1) == key
            row = tl.load(order + place, mask=here, other=0) // pairs_of_row
            r = block * BLOCK_R + tl.arange(0, BLOCK_R)
            begin = tl.program_id(2) * SPAN
            x_rows = x + row.to(tl.int64)[:, None] * x_stride
            slot, expert = (key // num_experts).to(tl.int64), (key % num_experts).to(tl.int64)
            a_of_pair = a + slot * slot_stride + expert * expert_stride
            a_rows = a_of_pair + (part * R + r[None, :]) * K
            total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
            for start in range(begin, tl.minimum(begin + SPAN, K), BLOCK_K):
                k = start + tl.arange(0, BLOCK_K)
                some = tl.load(x_rows + k[None, :], mask=here[:, None] & (k < K)[None, :], other=0.0)
                weight = tl.load(a_rows + k[:, None], mask=(k < K)[:, None] & (r < rank)[None, :], other=0.0)
                total = tl.dot(some, weight, total)
            at = low + (tl.program_id(2).to(tl.int64) * num_pairs + place)[:, None] * (parts * R)
            tl.store(at + part * R + r[None, :], total, mask=here[:, None] & (r < rank)[None, :])


@triton.jit(do_not_specialize=["num_pairs", "num_experts"])
def expand_pairs_kernel(
    low,
    b,  # [S, E, P * rows, R]
    order,
    keys,
    chunks,
    ranks,
    out,  # [pairs, P * rows]
    num_pairs,
    num_experts,
    rows,
    R,
    width,  # P * R
    out_stride,
    slot_stride,
    expert_stride,
    SPANS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """What it reads before it waits is older than the kernel ahead, A x: weights, the order, and the output."""
    first = tl.load(chunks + tl.program_id(0))
    some = first >= 0
    key = tl.load(keys + first, mask=some, other=0)
    rank = tl.load(ranks + key // num_experts, mask=some, other=0)
    tiles = tl.cdiv(rows, BLOCK_N)
    part, begin = tl.program_id(1) // tiles, tl.program_id(1) % tiles * BLOCK_N
    place, col, r = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
    inside = begin + col < rows
    here = some & (tl.load(keys + place, mask=some & (place < num_pairs), other=-1) == key)
    pair = tl.load(order + place, mask=here, other=0)
    slot, expert = (key // num_experts).to(tl.int64), (key % num_experts).to(tl.int64)
    b_of_pair = b + slot * slot_stride + expert * expert_stride
    b_rows = b_of_pair + (part * rows + begin).to(tl.int64) * R + (col[None, :] * R + r[:, None])
    weight = tl.load(b_rows, mask=(r < rank)[:, None] & inside[None, :], other=0.0)
    at = out + pair.to(tl.int64)[:, None] * out_stride + (part * rows + begin) + col[None, :]
    changes = here[:, None] & inside[None, :] & (rank > 0)
    before = tl.load(at, mask=changes, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if rank > 0:
        stride = num_pairs.to(tl.int64) * width
        low_rows = low + place.to(tl.int64)[:, None] * width + part * R + r[None, :]
        read = here[:, None] & (r < rank)[None, :]
        delta = tl.dot(sum_of_spans(low_rows, stride, read, SPANS, b.dtype.element_ty), weight)
        for start in range(BLOCK_R, rank, BLOCK_R):
            more = start + r < rank
            weight = tl.load(b_rows + start, mask=more[:, None] & inside[None, :], other=0.0)
            read = here[:, None] & more[None, :]
            delta = tl.dot(sum_of_spans(low_rows + start, stride, read, SPANS, b.dtype.element_ty), weight, delta)
        tl.store(at, (before.to(tl.float32) + delta).to(out.dtype.element_ty), mask=changes)


def order_pairs(slots: torch.Tensor, ids: torch.Tensor, num_slots: int, num_experts: int) -> PairChunks:
    """Returns the pairs by adapter and expert. slots [T], ids [T, k] int32, contiguous."""
    num_pairs, top_k = ids.numel(), ids.shape[1]
    if num_pairs > FEW_PAIRS:
        return _order_many(slots, ids, num_slots, num_experts, 32)
    order, keys, chunks = torch.empty((3, -(-num_pairs // 4) * 4), dtype=torch.int32, device=ids.device)
    order_pairs_kernel[(triton.cdiv(num_pairs, 16),)](
        slots, ids, order, keys, chunks, num_pairs, top_k, num_experts,
        BLOCK=16, OTHERS=128, ROWS=16, NONE=NONE, num_warps=4,
    )  # fmt: skip
    return PairChunks(order, keys, chunks[:num_pairs], 16, num_experts)


def _order_many(slots: torch.Tensor, ids: torch.Tensor, num_slots: int, num_experts: int, rows: int) -> PairChunks:
    num_pairs, device = ids.numel(), ids.device
    num_chunks = min(num_pairs, triton.cdiv(num_pairs, rows) + num_slots * num_experts - 1)
    key = torch.where((slots[:, None] > 0) & (ids >= 0), (slots[:, None] - 1) * num_experts + ids, NONE).flatten()
    keys, order = torch.sort(key, stable=True)
    at = torch.arange(num_pairs, device=device)
    starts = (keys < NONE) & ((at - torch.searchsorted(keys, keys)) % rows == 0)
    chunks = torch.full((num_chunks + 1,), -1, dtype=torch.int32, device=device)
    chunks[torch.where(starts, starts.cumsum(0) - 1, num_chunks)] = at.to(torch.int32)
    return PairChunks(order.to(torch.int32), keys, chunks[:num_chunks], rows, num_experts)


def add_to_pairs(x: torch.Tensor, out: torch.Tensor, pairs: PairChunks, weights: ExpertAdapterWeights) -> None:
    """Does as the reference. Rows of x and out are contiguous, `weights` too; x, out and weights are of one 16-bit
    type."""
    num_pairs, size = len(out), x.shape[1]
    if not num_pairs:
        return
    num_parts, rank = weights.a.shape[2:4]
    few = pairs.rows == 16
    span = (512 if few else 2048) * triton.next_power_of_2(triton.cdiv(size, 512 * MOST_SPANS))
    spans = triton.cdiv(size, span)
    block_r = min(SHRINK_R, triton.next_power_of_2(rank))
    low = torch.empty((spans, num_pairs, num_parts * rank), dtype=torch.float32, device=x.device)
    grouped = pairs.order, pairs.keys, pairs.chunks
    shrink_pairs_kernel[(len(pairs.chunks), num_parts * triton.cdiv(rank, block_r), spans)](
        x, weights.a, *grouped, weights.ranks, low, num_pairs, pairs.num_experts, num_pairs // len(x), size, rank,
        x.stride(0), weights.a.stride(0), _expert_stride(weights.a), SPAN=span,
        BLOCK_M=pairs.rows, BLOCK_K=BLOCK_K, BLOCK_R=block_r, num_warps=4, num_stages=4 if few else 2,
    )  # fmt: skip
    rows, block_n = out.shape[1] // num_parts, 128 if few else 64
    expand_pairs_kernel[(len(pairs.chunks), num_parts * triton.cdiv(rows, block_n))](
        low, weights.b, *grouped, weights.ranks, out, num_pairs, pairs.num_experts, rows, rank, num_parts * rank,
        out.stride(0), weights.b.stride(0), _expert_stride(weights.b), SPANS=spans,
        BLOCK_M=pairs.rows, BLOCK_N=block_n, BLOCK_R=min(EXPAND_R, block_r), num_warps=4, num_stages=1,
        **pdl.options(),
    )  # fmt: skip


def _expert_stride(side: torch.Tensor) -> int:
    """Returns the distance between experts; 0 where they share A or B."""
    return side.stride(1) if side.shape[1] > 1 else 0


EXPERT_ADAPTERS = ExpertAdapterKernels(order_pairs, add_to_pairs)
