"""Kimi delta attention: the state, from chunk to chunk.

A program holds columns of one head's state S [K, V] in fp32 and goes through the chunks of one sequence:

    x = u - w S                                        new values
    o = scale * (exp(g) * q) S + scores x
    S = exp(g_last) * S + (exp(g_last - g) * k)^T x

where g has a number for each channel of a key (`channel_local`). Reference: `reference.recurrence`.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE = {"BLOCK_V": 16, "num_warps": 8, "num_stages": 1}
"""Columns of V a program: so few that nothing is spilled."""


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
