"""LoRA adapters of a linear layer, in two launches: A x into scratch (shrink), then B times that added to the layer's
output (expand). Reference: `layers/native_adapters`.

Tokens of several adapters lie mixed in a step. Once for all layers they are ordered by adapter and cut into chunks, so
that a program has tokens of one adapter, and a CUDA graph serves any mixture: it has as many chunks as there may be.
Programs share the inner dimension of A, because there would be too few of them to read A at the memory's speed; their
partial sums are added where they are read, always in the same order.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sglang.srt.layers.native_adapters import AdapterKernels
from sglang.srt.layers.triton_ops import pdl

if TYPE_CHECKING:
    from sglang.srt.layers.native_adapters import AdapterWeights

FEW_TOKENS = 512
"""Tokens up to which chunks are short: those of several adapters that decode."""
ORDERED_AT_ONCE = 1024
"""Tokens that one program orders."""
SHRINK_R, EXPAND_R = 64, 32
"""Most rows of A, and columns of B, that a program has at once."""
BLOCK_K = 128
MOST_SPANS = 16
TILE = 128
"""Columns of the output that a row of `tiles` stands for; all of one part."""


@dataclasses.dataclass(frozen=True, slots=True)
class Chunks:
    """The tokens of a step by adapter. order [T] int32: tokens, those without an adapter somewhere or not at all;
    table [C, 3] int32: of a chunk its adapter's slot counted from 1 (0: an empty one), and the first place in `order`
    and the number of its tokens, at most `rows`."""

    order: torch.Tensor
    table: torch.Tensor
    rows: int


@dataclasses.dataclass(frozen=True, slots=True)
class Tiles:
    """Columns of a layer's output: rows of `table` [M, 3] int32 are the first column, the end and the part of at most
    TILE of them. `aligned` divides all first columns."""

    table: torch.Tensor
    aligned: int


@triton.jit(do_not_specialize=["num_tokens", "num_slots", "num_chunks"])
def order_kernel(slots, order, chunks, num_tokens, num_slots, num_chunks, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """One program, at most BLOCK tokens and chunks."""
    at = tl.arange(0, BLOCK)
    slot = tl.load(slots + at, mask=at < num_tokens, other=0)
    begin, chunk = 0, 0
    for s in range(1, num_slots + 1):
        mine = slot == s
        count = tl.sum(mine.to(tl.int32), axis=0)
        tl.store(order + begin + tl.cumsum(mine.to(tl.int32), 0) - 1, at, mask=mine)
        row, some = chunks + (chunk + at) * 3, at * ROWS < count
        tl.store(row, tl.zeros((BLOCK,), tl.int32) + s, mask=some)
        tl.store(row + 1, begin + at * ROWS, mask=some)
        tl.store(row + 2, tl.minimum(count - at * ROWS, ROWS), mask=some)
        begin += count
        chunk += tl.cdiv(count, ROWS)
    for column in tl.static_range(3):
        tl.store(chunks + (chunk + at) * 3 + column, tl.zeros((BLOCK,), tl.int32), mask=chunk + at < num_chunks)


@triton.jit(do_not_specialize=["num_tokens"])
def shrink_kernel(
    x,
    a,
    order,
    chunks,
    ranks,
    low,  # [spans, T, P * R] fp32, by place in the order
    num_tokens,
    K,
    R,
    x_stride,
    SPAN: tl.constexpr,  # columns of a program
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    chunk = chunks + tl.program_id(0) * 3
    slot, first, count = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 2)
    place = tl.arange(0, BLOCK_M)
    here = place < count
    token = tl.load(order + first + place, mask=here, other=0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if slot > 0:
        rank = tl.load(ranks + slot - 1)
        blocks = tl.cdiv(R, BLOCK_R)
        part, block = tl.program_id(1) // blocks, tl.program_id(1) % blocks
        parts = tl.num_programs(1) // blocks
        r = block * BLOCK_R + tl.arange(0, BLOCK_R)
        begin = tl.program_id(2) * SPAN
        x_rows = x + token.to(tl.int64)[:, None] * x_stride
        a_rows = a + ((slot - 1).to(tl.int64) * parts + part) * R * K + r[None, :] * K
        total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for start in range(begin, tl.minimum(begin + SPAN, K), BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            some = tl.load(x_rows + k[None, :], mask=here[:, None] & (k < K)[None, :], other=0.0)
            weight = tl.load(a_rows + k[:, None], mask=(k < K)[:, None] & (r < rank)[None, :], other=0.0)
            total = tl.dot(some, weight, total)
        place_in_all = tl.program_id(2).to(tl.int64) * num_tokens + first + place
        at = low + place_in_all[:, None] * (parts * R) + part * R + r[None, :]
        tl.store(at, total, mask=here[:, None] & (r < rank)[None, :])


@triton.jit(do_not_specialize=["first_id"])
def look_up_kernel(
    ids,  # [T] int64
    a,  # [S, 1, R, K]
    order,
    chunks,
    ranks,
    low,  # [1, T, R] fp32, by place in the order
    first_id,
    K,
    R,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    chunk = chunks + tl.program_id(0) * 3
    slot, first, count = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 2)
    if slot > 0:
        rank = tl.load(ranks + slot - 1)
        place, r = tl.arange(0, BLOCK_M), tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
        here = place < count
        token = tl.load(order + first + place, mask=here, other=0)
        column = tl.load(ids + token, mask=here, other=0) - first_id
        inside = here & (column >= 0) & (column < K)
        a_rows = a + (slot - 1).to(tl.int64) * R * K + r[None, :].to(tl.int64) * K
        value = tl.load(a_rows + column[:, None], mask=inside[:, None] & (r < rank)[None, :], other=0.0)
        at = low + (first + place).to(tl.int64)[:, None] * R + r[None, :]
        tl.store(at, value.to(tl.float32), mask=here[:, None] & (r < rank)[None, :])


@triton.jit
def sum_of_spans(low, span_stride, here, SPANS: tl.constexpr, dtype: tl.constexpr):
    """Returns A x, rounded as the reference rounds it. The loads of all spans are in flight together."""
    sums = tl.load(low, mask=here, other=0.0)
    for span in tl.static_range(1, SPANS):
        sums += tl.load(low + span * span_stride, mask=here, other=0.0)
    return sums.to(dtype)


@triton.jit(do_not_specialize=["num_tokens"])
def expand_kernel(
    low,
    b,
    order,
    chunks,
    ranks,
    tiles,  # [tiles, 3] int32
    out,
    num_tokens,
    N,
    R,
    width,  # P * R
    out_stride,
    SPANS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
    PDL: tl.constexpr,
):
    chunk = chunks + tl.program_id(0) * 3
    slot, first, count = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 2)
    tile = tiles + tl.program_id(1) // (TILE // BLOCK_N) * 3
    begin = tl.multiple_of(tl.load(tile), ALIGNED) + tl.program_id(1) % (TILE // BLOCK_N) * BLOCK_N
    end, part = tl.load(tile + 1), tl.load(tile + 2)
    place, col, r = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
    some, inside = (place < count) & (slot > 0), begin + col < end
    index = tl.maximum(slot, 1) - 1
    token = tl.load(order + first + place, mask=some, other=0)
    rank = tl.where(slot > 0, tl.load(ranks + index), 0)
    b_rows = b + (index.to(tl.int64) * N + begin) * R + (col[None, :] * R + r[:, None])
    weight = tl.load(b_rows, mask=(r < rank)[:, None] & inside[None, :], other=0.0)
    at = out + token.to(tl.int64)[:, None] * out_stride + begin + col[None, :]
    changes = some[:, None] & inside[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if rank > 0:
        before = tl.load(at, mask=changes, other=0.0)
        stride = num_tokens.to(tl.int64) * width
        low_rows = low + (first + place).to(tl.int64)[:, None] * width + part * R + r[None, :]
        here = some[:, None] & (r < rank)[None, :]
        delta = tl.dot(sum_of_spans(low_rows, stride, here, SPANS, b.dtype.element_ty), weight)
        for start in range(BLOCK_R, rank, BLOCK_R):
            more = start + r < rank
            weight = tl.load(b_rows + start, mask=more[:, None] & inside[None, :], other=0.0)
            here = some[:, None] & more[None, :]
            delta = tl.dot(sum_of_spans(low_rows + start, stride, here, SPANS, b.dtype.element_ty), weight, delta)
        tl.store(at, (before.to(tl.float32) + delta).to(out.dtype.element_ty), mask=changes)


def prepare_adapters(weights: AdapterWeights) -> AdapterWeights:
    """Returns the weights with their `Tiles`."""
    parts, counts = (each.tolist() for each in torch.unique_consecutive(weights.parts, return_counts=True))
    table, begin = [], 0
    for part, count in zip(parts, counts, strict=True):
        table += [(at, min(at + TILE, begin + count), part) for at in range(begin, begin + count, TILE)]
        begin += count
    of_columns = torch.tensor(table, dtype=torch.int32, device=weights.parts.device)
    aligned = next(size for size in (16, 8, 4, 2, 1) if not any(first % size for first, _, _ in table))
    return dataclasses.replace(weights, tiles=Tiles(of_columns, aligned))


def chunk_rows(num_tokens: int) -> int:
    """Returns the most tokens of a chunk in a step of so many."""
    return 16 if num_tokens <= FEW_TOKENS else 64


def order_tokens(slots: torch.Tensor, num_slots: int) -> Chunks:
    """Returns the tokens by adapter. slots [T] int32."""
    num_tokens, rows = len(slots), chunk_rows(len(slots))
    num_chunks = min(num_tokens, triton.cdiv(num_tokens, rows) + num_slots - 1)
    if num_tokens > ORDERED_AT_ONCE:
        return _order_many(slots, num_slots, num_chunks, rows)
    order = torch.empty_like(slots)
    table = torch.empty((num_chunks, 3), dtype=torch.int32, device=slots.device)
    block = max(16, triton.next_power_of_2(num_tokens))
    order_kernel[(1,)](slots, order, table, num_tokens, num_slots, num_chunks, BLOCK=block, ROWS=rows, num_warps=4)
    return Chunks(order, table, rows)


def _order_many(slots: torch.Tensor, num_slots: int, num_chunks: int, rows: int) -> Chunks:
    device = slots.device
    order = torch.argsort(slots, stable=True).to(torch.int32)
    numbers = torch.arange(1, num_slots + 1, device=device, dtype=torch.int32)
    counts = (slots[:, None] == numbers).sum(0)
    per_slot = (counts + rows - 1) // rows
    last = per_slot.cumsum(0)
    chunk = torch.arange(num_chunks, device=device)
    index = torch.searchsorted(last, chunk, right=True)
    slot = index.clamp_max(num_slots - 1)
    at = (chunk - (last - per_slot)[slot]) * rows
    begin = len(slots) - counts.sum() + (counts.cumsum(0) - counts)[slot] + at
    table = torch.stack((slot + 1, begin, (counts[slot] - at).clamp_max(rows)), dim=1)
    return Chunks(order, torch.where((index < num_slots)[:, None], table, 0).to(torch.int32), rows)


def shrink(x: torch.Tensor, ordered: Chunks, weights: AdapterWeights, aside: bool = False) -> torch.Tensor:
    """Returns A x in partial sums [spans, T, P * R] fp32, by place in the order. Rows of x are contiguous."""
    num_tokens, size = x.shape
    _, num_parts, rank, _ = weights.a.shape
    few = ordered.rows < 64
    block_r = min(SHRINK_R, triton.next_power_of_2(rank))
    span = (1024 if few else 2048) * triton.next_power_of_2(triton.cdiv(size, 1024 * MOST_SPANS))
    spans = triton.cdiv(size, span)
    low = torch.empty((spans, num_tokens, num_parts * rank), dtype=torch.float32, device=x.device)
    shrink_kernel[(len(ordered.table), num_parts * triton.cdiv(rank, block_r), spans)](
        x, weights.a, ordered.order, ordered.table, weights.ranks, low, num_tokens, size, rank, x.stride(0), SPAN=span,
        BLOCK_M=ordered.rows, BLOCK_K=BLOCK_K, BLOCK_R=block_r, num_warps=4, num_stages=4 if few else 2,
        **({"PDL": False} if aside else pdl.options()),
    )  # fmt: skip
    return low


def look_up(ids: torch.Tensor, first: int, ordered: Chunks, weights: AdapterWeights) -> torch.Tensor:
    """Returns columns of A as `shrink` returns A x."""
    _, num_parts, rank, size = weights.a.shape
    assert num_parts == 1
    block_r = min(SHRINK_R, triton.next_power_of_2(rank))
    low = torch.empty((1, len(ids), rank), dtype=torch.float32, device=ids.device)
    look_up_kernel[(len(ordered.table), triton.cdiv(rank, block_r))](
        ids, weights.a, ordered.order, ordered.table, weights.ranks, low, first, size, rank,
        BLOCK_M=ordered.rows, BLOCK_R=block_r, num_warps=4,
    )  # fmt: skip
    return low


def expand(low: torch.Tensor, out: torch.Tensor, ordered: Chunks, weights: AdapterWeights) -> None:
    """Adds B times A x to out [T, N]. Its rows are contiguous, and it may be fp32 where the weights are not."""
    assert isinstance(weights.tiles, Tiles) and out.shape[1] == weights.b.shape[1]
    rank = weights.a.shape[2]
    many = ordered.rows > 16
    block_n = 64 if many or len(out) <= 64 else TILE
    tiles = weights.tiles.table
    expand_kernel[(len(ordered.table), len(tiles) * (TILE // block_n))](
        low, weights.b, ordered.order, ordered.table, weights.ranks, tiles, out, len(out), out.shape[1], rank,
        low.shape[2], out.stride(0), SPANS=len(low), BLOCK_M=ordered.rows, BLOCK_N=block_n,
        BLOCK_R=min(EXPAND_R, triton.next_power_of_2(rank)), TILE=TILE, ALIGNED=weights.tiles.aligned,
        num_warps=8 if many else 4, num_stages=1, **pdl.options(),
    )  # fmt: skip


ADAPTERS = AdapterKernels(prepare_adapters, order_tokens, shrink, look_up, expand)
