"""Kimi delta attention's chunks as they were: 64 tokens a chunk, the state [K, V] in eight warps."""
# ruff: noqa
# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from earlier_chunks import _inverse

from sglang.srt.layers.recurrent.rule import Rule
from sglang.srt.layers.recurrent.triton_ops import channel_decay
from sglang.srt.layers.recurrent.triton_ops.sequences import locate, num_blocks

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


SCAN_TILE = {"BLOCK_V": 16, "num_warps": 8, "num_stages": 1}


@triton.jit(do_not_specialize_on_alignment=["start_loc", "prefix_lens", "initial_slots", "slots"])
def channel_scan_kernel(
    q, k, scores, decay, u, w, states, initial_slots, slots, prefix_lens, start_loc, out, heads, token_stride,
    out_stride, slot_stride, scale, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """states [slots, heads, K, V]; out [T, heads, V] in rows `out_stride` apart; the others as in channel_local.
    Grid: (blocks of V, heads, sequences)."""
    head, seq = tl.program_id(1), tl.program_id(2)
    start = tl.load(start_loc + seq)
    length = tl.load(start_loc + seq + 1) - start
    if length <= 0:
        return
    row, k_cols = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    v_cols = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    k_ok, v_ok = k_cols < K, v_cols < V
    tile = k_cols[:, None] * V + v_cols[None, :]
    tile_ok = k_ok[:, None] & v_ok[None, :]
    has_prefix = tl.load(prefix_lens + seq) > 0
    before = states + tl.load(initial_slots + seq).to(tl.int64) * slot_stride + head * K * V
    state = tl.load(before + tile, mask=tile_ok & has_prefix, other=0.0).to(tl.float32)
    dtype = q.dtype.element_ty
    # Scalars point to the chunk and grow with it; offsets within it stay, and are 32-bit numbers.
    qk_offsets = row[:, None] * token_stride + k_cols[None, :]
    qk_base = start.to(tl.int64) * token_stride + head * K
    out_offsets = row[:, None] * out_stride + v_cols[None, :]
    out_base = out + start.to(tl.int64) * out_stride + head * V
    channel_offsets = row[:, None] * (heads * K) + k_cols[None, :]
    of_head = start.to(tl.int64) * heads + head

    for first in range(0, length, CHUNK):
        inside = row < length - first
        k_mask, v_mask = inside[:, None] & k_ok[None, :], inside[:, None] & v_ok[None, :]
        rounded = state.to(dtype)
        own_w = tl.load(w + of_head * K + channel_offsets, mask=k_mask, other=0.0)
        u_offsets = row[:, None] * (heads * V) + v_cols[None, :]
        values = tl.load(u + of_head * V + u_offsets, mask=v_mask, other=0.0).to(tl.float32)
        values = (values - tl.dot(own_w, rounded)).to(dtype)
        g = tl.load(decay + of_head * K + channel_offsets, mask=k_mask, other=0.0)
        queries = tl.load(q + qk_base + qk_offsets, mask=k_mask, other=0.0).to(tl.float32) * tl.exp(g)
        result = tl.dot(queries.to(dtype), rounded) * scale
        score_offsets = row[:, None] * (heads * CHUNK) + row[None, :]
        own_scores = tl.load(scores + of_head * CHUNK + score_offsets, mask=inside[:, None], other=0.0)
        result = tl.dot(own_scores, values, result)
        tl.store(out_base + out_offsets, result.to(out.dtype.element_ty), mask=v_mask)
        last_row = tl.minimum(CHUNK, length - first) - 1
        last = tl.load(decay + (of_head + last_row * heads) * K + k_cols, mask=k_ok, other=0.0)
        g = tl.load(decay + of_head * K + channel_offsets, mask=k_mask, other=0.0)  # again, rather than to hold it
        keys = tl.load(k + qk_base + qk_offsets, mask=k_mask, other=0.0).to(tl.float32)
        faded = (keys * tl.exp(last[None, :] - g)).to(dtype)
        # Rows behind the sequence have no decay and no key.
        state = tl.dot(tl.trans(faded), values, state * tl.exp(last)[:, None])
        qk_base += CHUNK * token_stride
        out_base += CHUNK * out_stride
        of_head += CHUNK * heads

    after = states + tl.load(slots + seq).to(tl.int64) * slot_stride + head * K * V
    tl.store(after + tile, state.to(states.dtype.element_ty), mask=tile_ok)


def channel_recurrence_extend(
    rule: Rule,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor | None,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor | None,
    states: torch.Tensor,
    initial_slots: torch.Tensor,
    slots: torch.Tensor,
    prefix_lens: torch.Tensor,
    start_loc: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Ragged new tokens of B sequences, each over the state of its prefix: as `recurrence.recurrence_extend`."""
    num_tokens, heads, value_dim = v.shape
    key_dim, num_seqs = k.shape[2], start_loc.shape[0] - 1
    if num_tokens == 0 or num_seqs == 0:
        return
    assert b is not None and skip is None and k.shape[1] == heads, "each head has keys and a gate of its own"
    assert len(v) == 1 or q.stride(0) == k.stride(0) == v.stride(0), "q, k and v are parts of one row"
    assert a.is_contiguous()
    chunk, device = CHUNK, v.device
    block_k, programs = triton.next_power_of_2(key_dim), num_blocks(num_tokens, num_seqs, chunk) * heads
    decay = torch.empty((num_tokens, heads, key_dim), dtype=torch.float32, device=device)
    scores = torch.empty((num_tokens, heads, chunk), dtype=v.dtype, device=device)
    pairs = torch.empty((num_tokens, heads, chunk), dtype=torch.float32, device=device)
    u, w = (torch.empty((num_tokens, heads, dim), dtype=v.dtype, device=device) for dim in (value_dim, key_dim))
    channel_decay.channel_decay_kernel[(programs,)](
        a, a_log, dt_bias, start_loc, decay, num_seqs, heads, rule.lower_bound, K=key_dim, BLOCK_K=block_k, CHUNK=chunk,
        BOUNDED=rule.lower_bound != 0.0, **channel_decay.TILE,
    )  # fmt: skip
    rows = ROWS
    channel_pairs_kernel[(programs * (chunk // rows),)](
        q, k, b, decay, start_loc, scores, pairs, num_seqs, heads, v.stride(0), b.stride(0), rule.scale, K=key_dim,
        BLOCK_K=block_k, CHUNK=chunk, ROWS=rows, **PAIRS_TILE,
    )  # fmt: skip
    channel_solve_kernel[(programs,)](
        k, v, b, decay, pairs, start_loc, u, w, num_seqs, heads, v.stride(0), b.stride(0), K=key_dim, V=value_dim,
        BLOCK_K=block_k, BLOCK_V=triton.next_power_of_2(value_dim), CHUNK=chunk, **SOLVE_TILE,
    )  # fmt: skip
    tile = SCAN_TILE
    channel_scan_kernel[(triton.cdiv(value_dim, tile["BLOCK_V"]), heads, num_seqs)](
        q, k, scores, decay, u, w, states, initial_slots, slots, prefix_lens, start_loc, out, heads, v.stride(0),
        out.stride(0), states.stride(0), rule.scale, K=key_dim, V=value_dim, BLOCK_K=block_k, CHUNK=chunk, **tile,
    )  # fmt: skip
