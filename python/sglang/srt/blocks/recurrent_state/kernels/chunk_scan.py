"""Second half of a chunked recurrence: the state, from chunk to chunk.

A program holds columns of one head's state S [K, V] in fp32 and goes through the chunks of one sequence:

    x = u - w S  (delta rule)  or  beta * v            new values
    o = scale * exp(g) * (q S) + scores x  [+ skip * v]
    S = exp(g_last) * S + k^T (exp(g_last - g) * x)

The state is read once before and written once after. Reference: the recurrence itself, `reference.recurrence`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def inside_block(rows_ok, cols, SIZE: tl.constexpr, BLOCK: tl.constexpr):
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
        qk_mask, v_mask = inside_block(inside, k_cols, K, BLOCK_K), inside_block(inside, v_cols, V, BLOCK_V)
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


TILE = {"BLOCK_V": 16, "num_warps": 8, "num_stages": 2}
"""So few columns that with 256 keys no operand of the products fills the registers."""
