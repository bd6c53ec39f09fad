"""Kimi delta attention: what a chunk of tokens needs without knowing the state before it.

With g the sums of each channel's log decays since the chunk's start (`channel_decay`), rows i and columns j of a chunk:

    scores[i, j] = scale * sum_c q_ic k_jc exp(g_ic - g_jc)          for j <= i, else 0
    pairs[i, j]  = beta_i * sum_c k_ic k_jc exp(g_ic - g_jc)         for j < i, else 0
    u = (1 + pairs)^-1 (beta * v)        w = (1 + pairs)^-1 (beta * exp(g) * k)

so that with the state S before the chunk the new values are u - w S (arXiv 2510.26692). exp(g_i) and exp(-g_j) apart
would overflow where channels forget fast. So a program takes 16 rows: for the columns before them both factors are
taken relative to the first of the rows, where neither exceeds 1, and they are a product of matrices; the 16 columns of
the rows themselves are summed channel by channel.

Reference: the recurrence itself, `reference.recurrence`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.srt.blocks.recurrent_state.kernels.chunk_local import _inverse
from sglang.srt.blocks.recurrent_state.kernels.sequences import locate

CHUNK = 64
"""Tokens that are computed at once."""
ROWS = 16
"""Rows of a chunk that a program compares with those before them."""
PAIRS_TILE = {"num_warps": 4, "num_stages": 1}
SOLVE_TILE = {"num_warps": 8, "num_stages": 1}


@triton.jit(do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=["start_loc"])
def channel_pairs_kernel(
    q, k, b, decay, start_loc, scores, pairs, num_seqs, heads, token_stride, b_stride, scale, K: tl.constexpr,
    BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """q, k [T, heads, K] in rows `token_stride` apart; b [T, heads]; decay [T, heads, K] -> scores [T, heads, CHUNK],
    pairs [T, heads, CHUNK] fp32. Grid: (chunks * heads * CHUNK / ROWS,)."""
    PARTS: tl.constexpr = CHUNK // ROWS
    pid = tl.program_id(0)
    part = pid % PARTS
    head = (pid // PARTS) % heads
    _, start, length, chunk = locate(start_loc, num_seqs, pid // (PARTS * heads), CHUNK)
    first = chunk + part * ROWS
    if (chunk < 0) | (first >= length):
        return
    row, cols = tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    inside, col_ok = first + row < length, cols < K
    token = (start + first + row).to(tl.int64)
    mask = inside[:, None] & col_ok[None, :]
    queries = tl.load(q + token[:, None] * token_stride + head * K + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    keys = tl.load(k + token[:, None] * token_stride + head * K + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    g = tl.load(decay + (token * heads + head)[:, None] * K + cols[None, :], mask=mask, other=0.0)
    beta = tl.sigmoid(tl.load(b + token * b_stride + head, mask=inside, other=0.0).to(tl.float32))
    into = (token * heads + head)[:, None] * CHUNK + row[None, :]
    score_type = scores.dtype.element_ty

    begin = (start + first).to(tl.int64)
    before = tl.load(decay + (begin * heads + head) * K + cols, mask=col_ok, other=0.0)
    faded = tl.exp(tl.minimum(g - before[None, :], 0.0))  # 1 behind the sequence, where there is no g
    faded_queries, faded_keys = queries * faded, keys * faded
    for other in range(part):
        others = (start + chunk + other * ROWS + row).to(tl.int64)
        ok = col_ok[None, :]
        early = tl.load(k + others[:, None] * token_stride + head * K + cols[None, :], mask=ok, other=0.0)
        early_g = tl.load(decay + (others * heads + head)[:, None] * K + cols[None, :], mask=ok, other=0.0)
        grown = tl.trans(early.to(tl.float32) * tl.exp(before[None, :] - early_g))
        with_queries = tl.dot(faded_queries, grown, input_precision="tf32") * scale
        with_keys = tl.dot(faded_keys, grown, input_precision="tf32") * beta[:, None]
        tl.store(scores + into + other * ROWS, with_queries.to(score_type), mask=inside[:, None])
        tl.store(pairs + into + other * ROWS, with_keys, mask=inside[:, None])

    own_scores = tl.zeros([ROWS, ROWS], dtype=tl.float32)
    own_pairs = tl.zeros([ROWS, ROWS], dtype=tl.float32)
    for column in range(ROWS):
        ok = col_ok & (first + column < length)
        other_key = tl.load(k + (begin + column) * token_stride + head * K + cols, mask=ok, other=0.0).to(tl.float32)
        other_g = tl.load(decay + ((begin + column) * heads + head) * K + cols, mask=ok, other=0.0)
        # Of rows before the column the differences are positive and would overflow; they do not count.
        weighted = other_key[None, :] * tl.exp(tl.minimum(g - other_g[None, :], 0.0))
        here = row[None, :] == column
        own_scores = tl.where(here, tl.sum(queries * weighted, 1)[:, None], own_scores)
        own_pairs = tl.where(here, tl.sum(keys * weighted, 1)[:, None], own_pairs)
    own_scores = tl.where(row[:, None] >= row[None, :], own_scores * scale, 0.0)
    own_pairs = tl.where(row[:, None] > row[None, :], own_pairs * beta[:, None], 0.0)
    tl.store(scores + into + part * ROWS, own_scores.to(score_type), mask=inside[:, None])
    tl.store(pairs + into + part * ROWS, own_pairs, mask=inside[:, None])
    nothing = tl.zeros([ROWS, ROWS], dtype=tl.float32)
    for other in range(part + 1, PARTS):
        tl.store(scores + into + other * ROWS, nothing.to(score_type), mask=inside[:, None])
        tl.store(pairs + into + other * ROWS, nothing, mask=inside[:, None])


@triton.jit(do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=["start_loc"])
def channel_solve_kernel(
    k, v, b, decay, pairs, start_loc, u, w, num_seqs, heads, token_stride, b_stride, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """k [T, heads, K], v [T, heads, V] in rows `token_stride` apart; b, decay and pairs as in `channel_pairs_kernel` ->
    u [T, heads, V], w [T, heads, K]. Grid: (chunks * heads,)."""
    pid = tl.program_id(0)
    head = pid % heads
    _, start, length, first = locate(start_loc, num_seqs, pid // heads, CHUNK)
    if (first < 0) | (first >= length):
        return
    row = tl.arange(0, CHUNK)
    inside = first + row < length
    token = (start + first + row).to(tl.int64)
    of_head = token * heads + head
    compared = tl.load(pairs + of_head[:, None] * CHUNK + row[None, :], mask=inside[:, None], other=0.0)
    solution = _inverse(compared, CHUNK).to(k.dtype.element_ty)
    beta = tl.sigmoid(tl.load(b + token * b_stride + head, mask=inside, other=0.0).to(tl.float32))
    k_cols = tl.arange(0, BLOCK_K)
    k_mask = inside[:, None] & (k_cols < K)[None, :]
    keys = tl.load(k + token[:, None] * token_stride + head * K + k_cols[None, :], mask=k_mask, other=0.0)
    g = tl.load(decay + of_head[:, None] * K + k_cols[None, :], mask=k_mask, other=0.0)
    faded = (keys.to(tl.float32) * beta[:, None] * tl.exp(g)).to(keys.dtype)
    tl.store(w + of_head[:, None] * K + k_cols[None, :], tl.dot(solution, faded).to(w.dtype.element_ty), mask=k_mask)
    v_cols = tl.arange(0, BLOCK_V)
    v_mask = inside[:, None] & (v_cols < V)[None, :]
    values = tl.load(v + token[:, None] * token_stride + head * V + v_cols[None, :], mask=v_mask, other=0.0)
    weighted = (values.to(tl.float32) * beta[:, None]).to(keys.dtype)
    tl.store(u + of_head[:, None] * V + v_cols[None, :], tl.dot(solution, weighted).to(u.dtype.element_ty), mask=v_mask)
