"""Logits of the indexer (DeepSeek sparse attention): the relevance of each visible entry for each new token.

A program computes ROWS neighbouring tokens, all their heads as the columns of one product, over every num_parts-th tile
of entries; the grid depends on shapes only. Entries are the rows, so that a thread holds several heads of an entry and
the sum over heads takes two steps between threads. With heads as rows it goes through shared memory and takes four
times as long. If the tokens belong to several requests, a program handles these one after the other. Tokens that see no
more entries than are selected get no logits.

e4m3 queries and keys are multiplied unscaled. Scales are positive, so they may follow the ReLU: those of queries are in
the head weights already, and a key's multiplies its sum. Reference: `native_sparse_ops.index_logits`.
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
MAX_TOKENS = 16
"""Most tokens per program: more would spill registers if an indexer has few heads."""


@triton.jit
def head_sums(keys, q, weights, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr):
    """keys [N, DIM], q [DIM, ROWS * HEADS] of ROWS tokens, weights [ROWS * HEADS] -> [N, ROWS] fp32."""
    scores = tl.maximum(tl.dot(keys, q), 0.0) * weights[None, :]
    return tl.sum(tl.reshape(scores, [BLOCK_N, ROWS, HEADS]), 2)


# Index arrays arrive as slices of one packed buffer: their alignment must not decide about a recompilation.
@triton.jit(
    do_not_specialize=["num_rows", "num_parts", "top_k", "rate", "stride_rt", "stride_logits"],
    do_not_specialize_on_alignment=["req_pool_indices_ptr", "counts_ptr"],
)
def index_logits_kernel(
    q_ptr, weights_ptr, keys_ptr, scales_ptr, req_to_token_ptr, req_pool_indices_ptr, counts_ptr, logits_ptr, num_rows,
    num_parts, top_k, rate, stride_rt, stride_keys, stride_scales, stride_logits, HEADS: tl.constexpr,
    DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, QUANTIZED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """q [T, HEADS, DIM] and weights [T, HEADS] fp32, keys [S, DIM] (with scales [S] fp32 if QUANTIZED), counts [T] ->
    logits [T, entries] fp32, of which those of a token that sees more than top_k entries are written.
    Grid: (num_parts * cdiv(T, ROWS),)."""
    pid = tl.program_id(0)
    part = pid % num_parts
    row = pid // num_parts * ROWS + tl.arange(0, ROWS)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    counts = tl.load(counts_ptr + row, mask=row < num_rows, other=0)
    counts = tl.where(counts > top_k, counts, 0)
    if tl.max(counts, 0) <= part * BLOCK_N:
        return
    requests = tl.load(req_pool_indices_ptr + row, mask=row < num_rows, other=0)
    lines = pid // num_parts * (ROWS * HEADS) + tl.arange(0, ROWS * HEADS)
    line_ok = lines < num_rows * HEADS
    q = tl.trans(load_rows(q_ptr, lines.to(tl.int64) * DIM, line_ok, 0, DIM, DIM, True))
    weights = tl.load(weights_ptr + lines, mask=line_ok, other=0.0)
    offs_n = tl.arange(0, BLOCK_N)
    step = num_parts * BLOCK_N

    open_counts = counts
    while tl.max(open_counts, 0) > 0:
        first = tl.min(tl.where(open_counts > 0, tl.arange(0, ROWS), ROWS), 0)
        request = tl.sum(tl.where(tl.arange(0, ROWS) == first, requests, 0), 0)
        own_counts = tl.where(requests == request, open_counts, 0)
        end = tl.max(own_counts, 0)
        table = req_to_token_ptr + request.to(tl.int64) * stride_rt
        begin = part * BLOCK_N
        slots = tl.load(table + (begin + offs_n) * rate, mask=begin + offs_n < end, other=0) // rate
        if QUANTIZED:
            scales = tl.load(scales_ptr + slots.to(tl.int64) * stride_scales, mask=begin + offs_n < end, other=0.0)
        for n in range(begin, end, step):
            pos = n + offs_n
            ahead = pos + step
            next_slots = tl.load(table + ahead * rate, mask=ahead < end, other=0) // rate
            keys = load_rows(keys_ptr, slots.to(tl.int64) * stride_keys, pos < end, 0, DIM, DIM, True)
            logits = head_sums(keys, q, weights, BLOCK_N, ROWS, HEADS)
            if QUANTIZED:
                logits *= scales[:, None]
                # Behind the product, when the slots have come; nothing waits for these before the next product.
                scales = tl.load(scales_ptr + next_slots.to(tl.int64) * stride_scales, mask=ahead < end, other=0.0)
            out = logits_ptr + row.to(tl.int64)[None, :] * stride_logits + pos[:, None]
            tl.store(out, logits, mask=pos[:, None] < own_counts[None, :])
            slots = next_slots
        open_counts = tl.where(requests == request, 0, open_counts)


def rows_together(run: int, num_heads: int, tile: Mapping[str, int]) -> int:
    """Returns the tokens per program, a power of two, for requests with `run` tokens each."""
    return max(1, MIN_COLUMNS // num_heads, min(triton.next_power_of_2(run), tile["BLOCK_M"] // num_heads, MAX_TOKENS))


def index_logits(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    scales: torch.Tensor | None,
    rows: EntryRows,
    top_k: int,
    logits: torch.Tensor,
    *,
    tile: Mapping[str, int],
    num_sms: int,
) -> None:
    """Fills the first rows.counts columns of logits [T, rows.max_count or more] fp32 in rows that see more than top_k
    entries; nothing else is written. q [T, H, 128] in the keys' dtype and weights [T, H] fp32, both contiguous; keys
    [S, 1, 128], scales [S, 1] fp32; H a power of two. `num_sms`: of the GPU. Raises ValueError or TypeError for other
    inputs."""
    num_rows, num_heads, dim = q.shape
    if num_rows == 0:
        return
    if num_heads & (num_heads - 1):
        raise ValueError(f"an indexer of {num_heads} heads; the kernel takes powers of two")
    if q.dtype != keys.dtype or (scales is not None) != (keys.element_size() == 1):
        raise TypeError(f"queries are {q.dtype}, keys {keys.dtype}, with scales: {scales is not None}")
    together = rows_together(rows.run, num_heads, tile)
    blocks = triton.cdiv(num_rows, together)
    # Programs of half as many columns have half as many registers.
    at_once = num_sms * tile["ctas_per_sm"] * min(2, tile["BLOCK_M"] // (together * num_heads))
    parts = max(1, min(triton.cdiv(rows.max_count, tile["BLOCK_N"]), at_once // blocks))
    index_logits_kernel[(blocks * parts,)](
        q, weights, keys, weights if scales is None else scales, rows.req_to_token, rows.req_pool_indices, rows.counts,
        logits, num_rows, parts, top_k, rows.rate, rows.req_to_token.stride(0), keys.stride(0),
        1 if scales is None else scales.stride(0), logits.stride(0), HEADS=num_heads, DIM=dim, ROWS=together,
        BLOCK_N=tile["BLOCK_N"], QUANTIZED=scales is not None, num_warps=tile["num_warps"],
        num_stages=tile["num_stages"], **pdl.options(),
    )  # fmt: skip
