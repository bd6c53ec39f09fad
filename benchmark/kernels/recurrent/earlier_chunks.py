"""The chunked recurrence as it was: 64 tokens a chunk, the state [K, V] in eight warps."""
# ruff: noqa
# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from sglang.srt.layers.recurrent.triton_ops.gates import gates
from sglang.srt.layers.recurrent.triton_ops.sequences import locate, num_blocks

CHUNK = 64
"""Tokens that are computed at once."""
LOCAL_TILE = {"num_warps": 8, "num_stages": 2}


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


@triton.jit
def _inside(rows_ok, cols, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Mask [rows, cols], without a look at the columns where blocks divide them."""
    if SIZE % BLOCK == 0:
        return rows_ok[:, None]
    else:
        return rows_ok[:, None] & (cols < SIZE)[None, :]


@triton.jit(do_not_specialize_on_alignment=["start_loc", "prefix_lens", "initial_slots", "slots"])
def chunk_scan_kernel(
    q, k, v, scores, decay, beta, u, w, skip, states, initial_slots, slots, prefix_lens, start_loc, out, heads, group,
    token_stride, out_stride, slot_stride, scale, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, DELTA: tl.constexpr, HAS_SKIP: tl.constexpr,
):  # fmt: skip
    """states [slots, heads, K, V]; out [T, heads, V] in rows `out_stride` apart; the others as in chunk_local.
    Grid: (blocks of V, heads, sequences)."""
    head, seq = tl.program_id(1), tl.program_id(2)
    start = tl.load(start_loc + seq)
    length = tl.load(start_loc + seq + 1) - start
    if length <= 0:
        return
    row, k_cols = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    v_cols = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    tile = k_cols[:, None] * V + v_cols[None, :]
    tile_ok = (k_cols < K)[:, None] & (v_cols < V)[None, :]
    has_prefix = tl.load(prefix_lens + seq) > 0
    before = states + tl.load(initial_slots + seq).to(tl.int64) * slot_stride + head * K * V
    state = tl.load(before + tile, mask=tile_ok & has_prefix, other=0.0).to(tl.float32)
    dtype = q.dtype.element_ty
    # Scalars point to the chunk and grow with it; offsets within it stay, and are 32-bit numbers.
    qk_offsets = row[:, None] * token_stride + k_cols[None, :]
    qk_base = start.to(tl.int64) * token_stride + (head // group) * K
    v_offsets = row[:, None] * token_stride + v_cols[None, :]
    v_base = v + start.to(tl.int64) * token_stride + head * V
    out_offsets = row[:, None] * out_stride + v_cols[None, :]
    out_base = out + start.to(tl.int64) * out_stride + head * V
    of_head = start.to(tl.int64) * heads + head

    for first in range(0, length, CHUNK):
        inside = row < length - first
        qk_mask, v_mask = _inside(inside, k_cols, K, BLOCK_K), _inside(inside, v_cols, V, BLOCK_V)
        g = tl.load(decay + of_head + row * heads, mask=inside, other=0.0)
        last = tl.load(decay + of_head + (tl.minimum(CHUNK, length - first) - 1) * heads)
        rounded = state.to(dtype)
        if DELTA:
            w_offsets = row[:, None] * (heads * K) + k_cols[None, :]
            u_offsets = row[:, None] * (heads * V) + v_cols[None, :]
            own_w = tl.load(w + of_head * K + w_offsets, mask=qk_mask, other=0.0)
            values = tl.load(u + of_head * V + u_offsets, mask=v_mask, other=0.0).to(tl.float32)
            values -= tl.dot(own_w, rounded)
        else:
            own_beta = tl.load(beta + of_head + row * heads, mask=inside, other=0.0)
            values = tl.load(v_base + v_offsets, mask=v_mask, other=0.0).to(tl.float32) * own_beta[:, None]
        queries = tl.load(q + qk_base + qk_offsets, mask=qk_mask, other=0.0)
        result = tl.dot(queries, rounded) * (tl.exp(g) * scale)[:, None]
        score_offsets = row[:, None] * (heads * CHUNK) + row[None, :]
        own_scores = tl.load(scores + of_head * CHUNK + score_offsets, mask=inside[:, None], other=0.0)
        result = tl.dot(own_scores, values.to(dtype), result)
        if HAS_SKIP:
            raw = tl.load(v_base + v_offsets, mask=v_mask, other=0.0).to(tl.float32)
            result += raw * tl.load(skip + head).to(tl.float32)
        tl.store(out_base + out_offsets, result.to(out.dtype.element_ty), mask=v_mask)
        keys = tl.load(k + qk_base + qk_offsets, mask=qk_mask, other=0.0)
        faded = (values * tl.exp(last - g)[:, None]).to(dtype)
        state = tl.dot(tl.trans(keys), faded, state * tl.exp(last))
        qk_base += CHUNK * token_stride
        v_base += CHUNK * token_stride
        out_base += CHUNK * out_stride
        of_head += CHUNK * heads

    after = states + tl.load(slots + seq).to(tl.int64) * slot_stride + head * K * V
    tl.store(after + tile, state.to(states.dtype.element_ty), mask=tile_ok)


def scan_tile(key_dim: int) -> Mapping[str, int]:
    """Columns of V a program: so few that no operand of the products fills the registers."""
    return {"BLOCK_V": 32 if key_dim <= 128 else 16, "num_warps": 8, "num_stages": 2}


def recurrence_extend(
    rule, q, k, v, a, b, a_log, dt_bias, skip, states, initial_slots, slots, prefix_lens, start_loc, out
):
    num_tokens, heads, value_dim = v.shape
    key_dim, num_seqs = k.shape[2], start_loc.shape[0] - 1
    chunk, delta, device = CHUNK, rule.delta, v.device
    block_k, group = triton.next_power_of_2(key_dim), heads // k.shape[1]
    scores = torch.empty((num_tokens, heads, chunk), dtype=v.dtype, device=device)
    decay = torch.empty((num_tokens, heads), dtype=torch.float32, device=device)
    beta = decay if delta else torch.empty_like(decay)
    u = torch.empty((num_tokens, heads, value_dim), dtype=v.dtype, device=device) if delta else v
    w = torch.empty((num_tokens, heads, key_dim), dtype=v.dtype, device=device) if delta else k
    chunk_local_kernel[(num_blocks(num_tokens, num_seqs, chunk) * heads,)](
        q, k, v, a, a if b is None else b, a_log, dt_bias, start_loc, scores, decay, beta, u, w, num_seqs, heads, group,
        v.stride(0), a.stride(0), rule.scale, rule.dt_min, rule.dt_max, K=key_dim, V=value_dim, BLOCK_K=block_k,
        BLOCK_V=triton.next_power_of_2(value_dim), CHUNK=chunk, DELTA=delta, **LOCAL_TILE,
    )  # fmt: skip
    tile = scan_tile(key_dim)
    chunk_scan_kernel[(triton.cdiv(value_dim, tile["BLOCK_V"]), heads, num_seqs)](
        q, k, v, scores, decay, beta, u, w, a_log if skip is None else skip, states, initial_slots, slots, prefix_lens,
        start_loc, out, heads, group, v.stride(0), out.stride(0), states.stride(0), rule.scale, K=key_dim, V=value_dim,
        BLOCK_K=block_k, CHUNK=chunk, DELTA=delta, HAS_SKIP=skip is not None, **tile,
    )  # fmt: skip
