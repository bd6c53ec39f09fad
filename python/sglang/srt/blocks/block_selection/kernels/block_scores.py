"""Scores of blocks of tokens: for each new token and KV head, the largest product of its query with a key of the block.

A program computes ROWS neighbouring tokens, all their heads as the columns of one product, over every num_parts-th
block; the grid depends on shapes only. Keys are the rows, so that the maximum over a block is one reduction of the
product. The tokens of a block have consecutive slots, so one row table lookup finds them all. If the tokens belong to
several requests, a program handles these one after the other. Tokens that see no more blocks than are selected get no
scores. Reference: `reference.block_scores`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from sglang.srt.layers.attention.selection import EntryRows
from sglang.srt.layers.attention.triton_ops.common import load_rows
from sglang.srt.layers.triton_ops import pdl

MIN_COLUMNS = 16
"""Smallest number of columns of a tensor core product."""


# Index arrays arrive as slices of one packed buffer: their alignment must not decide about a recompilation.
@triton.jit(
    do_not_specialize=["num_rows", "num_heads", "num_parts", "top_blocks", "local_blocks", "stride_rt", "stride_token"],
    do_not_specialize_on_alignment=["req_pool_indices_ptr", "counts_ptr"],
)
def block_scores_kernel(
    q_ptr, keys_ptr, req_to_token_ptr, req_pool_indices_ptr, counts_ptr, scores_ptr, num_rows, num_heads, num_parts,
    top_blocks, local_blocks, stride_rt, stride_qt, stride_keys, stride_token, stride_head, HEADS: tl.constexpr,
    DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """q [T, H, DIM], keys [S, DIM], counts [T] of tokens that are seen -> scores [T, H, blocks] fp32, of which those of
    tokens that see more than top_blocks blocks are written. HEADS: H, or more for columns that stay empty. Grid:
    (num_parts * cdiv(T, ROWS),)."""
    pid = tl.program_id(0)
    part = pid % num_parts
    line = tl.arange(0, ROWS * HEADS)
    row = pid // num_parts * ROWS + line // HEADS
    head = line % HEADS
    line_ok = (row < num_rows) & (head < num_heads)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    counts = tl.load(counts_ptr + row, mask=row < num_rows, other=0)
    counts = tl.where(counts > top_blocks * BLOCK, counts, 0)
    if tl.max(counts, 0) <= part * BLOCK:
        return
    requests = tl.load(req_pool_indices_ptr + row, mask=row < num_rows, other=0)
    q = tl.trans(load_rows(q_ptr, row.to(tl.int64) * stride_qt + head * DIM, line_ok, 0, DIM, DIM, True))
    offs_n = tl.arange(0, BLOCK_N)

    open_counts = counts
    while tl.max(open_counts, 0) > 0:
        first = tl.min(tl.where(open_counts > 0, line, ROWS * HEADS), 0)
        request = tl.sum(tl.where(line == first, requests, 0), 0)
        own_counts = tl.where(requests == request, open_counts, 0)
        end = tl.max(own_counts, 0)
        table = req_to_token_ptr + request.to(tl.int64) * stride_rt
        slot = tl.load(table + part * BLOCK, mask=part * BLOCK < end, other=0)
        for begin in range(part * BLOCK, end, num_parts * BLOCK):
            ahead = begin + num_parts * BLOCK
            next_slot = tl.load(table + ahead, mask=ahead < end, other=0)
            best = tl.full([ROWS * HEADS], float("-inf"), dtype=tl.float32)
            for n in tl.static_range(0, BLOCK, BLOCK_N):
                pos = begin + n + offs_n
                rows = (slot + n + offs_n).to(tl.int64) * stride_keys
                keys = load_rows(keys_ptr, rows, pos < end, 0, DIM, DIM, True)
                products = tl.dot(keys, q)
                products = tl.where(pos[:, None] < own_counts[None, :], products, float("-inf"))
                best = tl.maximum(best, tl.max(products, 0))
            in_own_block = (begin + local_blocks * BLOCK) >= tl.cdiv(own_counts, BLOCK) * BLOCK
            best = tl.where(in_own_block, float("inf"), best)
            out = scores_ptr + row.to(tl.int64) * stride_token + head * stride_head + begin // BLOCK
            tl.store(out, best, mask=line_ok & (begin < own_counts))
            slot = next_slot
        open_counts = tl.where(requests == request, 0, open_counts)


def rows_together(run: int, heads: int, tile: Mapping[str, int]) -> int:
    """Returns the tokens per program, a power of two, for requests with `run` tokens each and `heads` columns per
    token."""
    return max(1, min(triton.next_power_of_2(run), tile["BLOCK_M"] // heads))


def columns_of(num_heads: int, run: int) -> int:
    """Returns the columns per token: its heads, padded if a token alone would not fill a tensor core product."""
    heads = triton.next_power_of_2(num_heads)
    return max(heads, MIN_COLUMNS // triton.next_power_of_2(run))


def block_scores(
    q: torch.Tensor,
    keys: torch.Tensor,
    rows: EntryRows,
    block: int,
    top_blocks: int,
    local_blocks: int,
    scores: torch.Tensor,
    *,
    tile: Mapping[str, int],
    num_sms: int,
) -> None:
    """Fills scores [T, H, blocks of rows.max_count or more] fp32: for tokens that see more than top_blocks blocks, the
    columns of the blocks they see; nothing else is written. q [T, H, D] in the keys' dtype with adjacent heads; keys
    [S, 1, D]; `block` a power of two from 16 on. `num_sms`: of the GPU. Raises TypeError for other queries."""
    num_rows, num_heads, dim = q.shape
    if num_rows == 0:
        return
    if q.dtype != keys.dtype or q.stride(1) != dim:
        raise TypeError(f"queries are {q.dtype} with heads {q.stride(1)} apart, keys {keys.dtype}")
    heads = columns_of(num_heads, rows.run)
    together = rows_together(rows.run, heads, tile)
    programs = triton.cdiv(num_rows, together)
    parts = max(1, min(triton.cdiv(rows.max_count, block), num_sms * tile["ctas_per_sm"] // programs))
    block_scores_kernel[(programs * parts,)](
        q, keys, rows.req_to_token, rows.req_pool_indices, rows.counts, scores, num_rows, num_heads, parts, top_blocks,
        local_blocks, rows.req_to_token.stride(0), q.stride(0), keys.stride(0), scores.stride(0), scores.stride(1),
        HEADS=heads, DIM=dim, ROWS=together, BLOCK=block, BLOCK_N=min(block, tile["BLOCK_N"]),
        num_warps=tile["num_warps"], num_stages=tile["num_stages"], **pdl.options(),
    )  # fmt: skip
