"""First half of a chunked recurrence: all that a chunk of tokens needs without knowing the state before it.

With g the sums of log decays since the chunk's start, and rows i, columns j of a chunk:

    scores[i, j] = scale * (q_i . k_j) * exp(g_i - g_j)                       for j <= i
    A[i, j]      = beta_i * (k_i . k_j) * exp(g_i - g_j)                      for j < i, else 0
    u = (1 + A)^-1 (beta * v)        w = (1 + A)^-1 (beta * exp(g) * k)       delta rule only

so that with the state S before the chunk the new values are u - w S (arXiv 2412.06464, section 3.3). Without the delta
rule (Mamba-2, arXiv 2405.21060) there is nothing to solve: the new values are beta * v.

Reference: the recurrence itself, `reference.recurrence`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.srt.blocks.recurrent_state.kernels.gates import gates
from sglang.srt.blocks.recurrent_state.kernels.sequences import locate

CHUNK = 64
"""Tokens that are computed at once."""
TILE = {"num_warps": 8, "num_stages": 2}


@triton.jit
def _inverse(a, CHUNK: tl.constexpr):
    """(1 + a)^-1 of a strictly lower triangular a [CHUNK, CHUNK] fp32.

    Blocks of 16 on the diagonal by substitution, row after row; what is below them by products, of which three suffice
    as there are four blocks. Powers of the whole of `a` would lose all digits where keys repeat.
    """
    BLOCKS: tl.constexpr = CHUNK // 16
    index = tl.arange(0, CHUNK)
    same_block = (index // 16)[:, None] == (index // 16)[None, :]
    column = tl.arange(0, 16)
    in_blocks = tl.reshape(tl.where(same_block, a, 0.0), [CHUNK, BLOCKS, 16])
    diagonal = tl.reshape(tl.sum(in_blocks, 1), [BLOCKS, 16, 16])
    row_number = column[None, :, None]
    solved = tl.zeros([BLOCKS, 16, 16], dtype=tl.float32) + (row_number == column[None, None, :]).to(tl.float32)
    for i in range(1, 16):
        row = tl.sum(tl.where(row_number == i, diagonal, 0.0), 1)
        change = tl.sum(row[:, :, None] * solved, 1)
        solved -= tl.where(row_number == i, change[:, None, :], 0.0)
    spread = tl.broadcast_to(tl.reshape(solved, [CHUNK, 1, 16]), [CHUNK, BLOCKS, 16])
    blocks = tl.where(same_block, tl.reshape(spread, [CHUNK, CHUNK]), 0.0)
    below = tl.dot(blocks, tl.where(same_block, 0.0, a), input_precision="tf32")
    square = tl.dot(below, below, input_precision="tf32")
    series = square - below - tl.dot(below, square, input_precision="tf32")
    return blocks + tl.dot(series, blocks, input_precision="tf32")


@triton.jit(do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=["start_loc"])
def chunk_local_kernel(
    q, k, v, a, b, a_log, dt_bias, start_loc, scores, decay, beta_out, u, w, num_seqs, heads, group, token_stride,
    ab_stride, scale, dt_min, dt_max, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """q, k [T, heads / group, K], v [T, heads, V] in rows `token_stride` apart; a, b [T, heads]; a_log, dt_bias [heads]
    -> scores [T, heads, CHUNK], decay and beta_out [T, heads] fp32, and for the delta rule u [T, heads, V] and
    w [T, heads, K]. Grid: (chunks * heads,)."""
    pid = tl.program_id(0)
    head = pid % heads
    seq, start, length, first = locate(start_loc, num_seqs, pid // heads, CHUNK)
    if (first < 0) | (first >= length):
        return
    row = tl.arange(0, CHUNK)
    inside = first + row < length
    token = (start + first + row).to(tl.int64)
    k_cols = tl.arange(0, BLOCK_K)
    k_mask = inside[:, None] & (k_cols < K)[None, :]
    qk_offsets = token[:, None] * token_stride + (head // group) * K + k_cols[None, :]
    keys = tl.load(k + qk_offsets, mask=k_mask, other=0.0)
    queries = tl.load(q + qk_offsets, mask=k_mask, other=0.0)

    own_a = tl.load(a + token * ab_stride + head, mask=inside, other=0.0)
    own_b = own_a
    if DELTA:
        own_b = tl.load(b + token * ab_stride + head, mask=inside, other=0.0)
    log_decay, beta = gates(own_a, own_b, tl.load(a_log + head), tl.load(dt_bias + head), dt_min, dt_max, DELTA)
    total = tl.cumsum(tl.where(inside, log_decay, 0.0), 0)
    beta = tl.where(inside, beta, 0.0)
    of_head = token * heads + head
    tl.store(decay + of_head, total, mask=inside)

    before = row[:, None] > row[None, :]
    # Above the diagonal the differences are positive and would overflow.
    factor = tl.exp(tl.where(before, total[:, None] - total[None, :], 0.0))
    dot_qk = tl.dot(queries, tl.trans(keys))
    weighted = tl.where(row[:, None] >= row[None, :], dot_qk * factor * scale, 0.0)
    tl.store(scores + of_head[:, None] * CHUNK + row[None, :], weighted.to(scores.dtype.element_ty),
             mask=inside[:, None])  # fmt: skip
    if DELTA:
        dot_kk = tl.dot(keys, tl.trans(keys))
        solution = _inverse(tl.where(before, dot_kk * factor * beta[:, None], 0.0), CHUNK).to(keys.dtype)
        keys = tl.load(k + qk_offsets, mask=k_mask, other=0.0)  # again, rather than to hold them meanwhile
        scaled = (keys.to(tl.float32) * (beta * tl.exp(total))[:, None]).to(keys.dtype)
        w_tile = tl.dot(solution, scaled)
        tl.store(w + of_head[:, None] * K + k_cols[None, :], w_tile.to(w.dtype.element_ty), mask=k_mask)
        v_cols = tl.arange(0, BLOCK_V)
        v_mask = inside[:, None] & (v_cols < V)[None, :]
        values = tl.load(v + token[:, None] * token_stride + head * V + v_cols[None, :], mask=v_mask, other=0.0)
        u_tile = tl.dot(solution, (values.to(tl.float32) * beta[:, None]).to(keys.dtype))
        tl.store(u + of_head[:, None] * V + v_cols[None, :], u_tile.to(u.dtype.element_ty), mask=v_mask)
    else:
        tl.store(beta_out + of_head, beta, mask=inside)
