"""Second half of a chunked recurrence: the state, from chunk to chunk.

A program holds columns of one head's state S [K, V] in fp32 and goes through the chunks of one sequence:

    x = u - w S  (delta rule)  or  v                   new values
    o = scale * exp(g) * (q S) + scores x
    S = exp(g_last) * S + k^T (exp(g_last - g) * x)    [* beta]

Without the delta rule the scores hold beta and skip, and so does exp(g_last - g) beta. With a decay for each channel of a key the exponents of g are in q and k already (`channel_local`), and exp(g_last) is a
number for each row of S.

All of it is computed transposed. S^T and x^T leave one product in the registers in which the next one wants its left
side, if each warp has 16 columns of V: nothing goes from warp to warp while the state goes on, and what comes from
memory are right sides only, which are on their way two chunks ahead. Triton cuts products so that follow one another by
rows where none has more columns than rows; so the keys are taken in parts.

The state is read once before and written once after. Reference: the recurrence itself, `native.recurrence`.
"""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl


@triton.jit
def _inside(rows_ok, cols, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Mask [rows, cols], without a look at the columns where blocks divide them."""
    if SIZE % BLOCK == 0:
        return rows_ok[:, None]
    else:
        return rows_ok[:, None] & (cols < SIZE)[None, :]


@triton.jit(do_not_specialize_on_alignment=["start_loc", "prefix_lens", "initial_slots", "slots"])
def chunk_scan_kernel(
    q, k, v, scores, decay, fade, u, w, states, initial_slots, slots, prefix_lens, start_loc, out, heads, group,
    token_stride, out_stride, slot_stride, scale, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr, DELTA: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """states [slots, heads, K, V]; out [T, heads, V] in rows `out_stride` apart; the others as in chunk_local, or
    in channel_local with `decay` [chunks, heads, K].
    Grid: (blocks of V, heads, sequences)."""
    WIDTH: tl.constexpr = PART if PART < BLOCK_K else BLOCK_K
    PARTS: tl.constexpr = BLOCK_K // WIDTH
    head, seq = tl.program_id(1), tl.program_id(2)
    start = tl.load(start_loc + seq)
    length = tl.load(start_loc + seq + 1) - start
    if length <= 0:
        return
    row, k_cols = tl.arange(0, CHUNK), tl.arange(0, WIDTH)
    v_cols = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    tile = v_cols[:, None] + k_cols[None, :] * V
    has_prefix = tl.load(prefix_lens + seq) > 0
    before = states + tl.load(initial_slots + seq).to(tl.int64) * slot_stride + head * K * V
    state = ()  # transposed, in parts of the keys
    for part in tl.static_range(PARTS):
        tile_ok = (v_cols < V)[:, None] & (part * WIDTH + k_cols < K)[None, :] & has_prefix
        state = state + (tl.load(before + part * WIDTH * V + tile, mask=tile_ok, other=0.0).to(tl.float32),)
    dtype = q.dtype.element_ty
    # Scalars point to the chunk and grow with it; offsets within it stay, and are 32-bit numbers.
    qk_offsets = row[:, None] * token_stride + k_cols[None, :]
    qk_base = start.to(tl.int64) * token_stride + (head // group) * K
    w_offsets = row[:, None] * (heads * K) + k_cols[None, :]
    u_offsets = row[:, None] * (heads * V) + v_cols[None, :]
    v_offsets = row[:, None] * token_stride + v_cols[None, :]
    v_base = v + start.to(tl.int64) * token_stride + head * V
    score_offsets = row[:, None] * (heads * CHUNK) + row[None, :]
    out_offsets = row[:, None] * out_stride + v_cols[None, :]
    out_base = out + start.to(tl.int64) * out_stride + head * V
    of_head = start.to(tl.int64) * heads + head
    of_chunk = (start // CHUNK + seq).to(tl.int64) * heads + head

    for first in range(0, length, CHUNK):
        inside = row < length - first
        v_mask = _inside(inside, v_cols, V, BLOCK_V)
        taken = tl.zeros([BLOCK_V, CHUNK], dtype=tl.float32)
        result = tl.zeros([BLOCK_V, CHUNK], dtype=tl.float32)
        for part in tl.static_range(PARTS):
            mask = _inside(inside, part * WIDTH + k_cols, K, WIDTH)
            rounded = state[part].to(dtype)
            if DELTA:
                own_w = tl.load(w + of_head * K + part * WIDTH + w_offsets, mask=mask, other=0.0)
                taken = tl.dot(rounded, tl.trans(own_w), taken)
            queries = tl.load(q + qk_base + part * WIDTH + qk_offsets, mask=mask, other=0.0)
            result = tl.dot(rounded, tl.trans(queries), result)
        if not BY_CHANNEL:
            grown = tl.load(decay + of_head + row * heads, mask=inside, other=0.0)
            result *= (grown * scale)[None, :]
        if DELTA:
            values = tl.trans(tl.load(u + of_head * V + u_offsets, mask=v_mask, other=0.0)).to(tl.float32) - taken
        else:
            values = tl.trans(tl.load(v_base + v_offsets, mask=v_mask, other=0.0)).to(tl.float32)
        own_scores = tl.load(scores + of_head * CHUNK + score_offsets, mask=inside[:, None], other=0.0)
        result = tl.dot(values.to(dtype), tl.trans(own_scores), result)
        tl.store(out_base + out_offsets, tl.trans(result.to(out.dtype.element_ty)), mask=v_mask)
        if not BY_CHANNEL:
            values *= tl.load(fade + of_head + row * heads, mask=inside, other=0.0)[None, :]
            last = tl.load(decay + of_head + (tl.minimum(CHUNK, length - first) - 1) * heads)
        values = values.to(dtype)
        after = ()
        for part in tl.static_range(PARTS):
            mask = _inside(inside, part * WIDTH + k_cols, K, WIDTH)
            keys = tl.load(k + qk_base + part * WIDTH + qk_offsets, mask=mask, other=0.0)
            if BY_CHANNEL:
                channels = part * WIDTH + k_cols
                last = tl.load(decay + of_chunk * K + channels, mask=channels < K, other=0.0)[None, :]
            after = after + (tl.dot(values, keys, state[part] * last),)
        state = after
        qk_base += CHUNK * token_stride
        v_base += CHUNK * token_stride
        out_base += CHUNK * out_stride
        of_head += CHUNK * heads
        of_chunk += heads

    behind = states + tl.load(slots + seq).to(tl.int64) * slot_stride + head * K * V
    for part in tl.static_range(PARTS):
        tile_ok = (v_cols < V)[:, None] & (part * WIDTH + k_cols < K)[None, :]
        tl.store(behind + part * WIDTH * V + tile, state[part].to(states.dtype.element_ty), mask=tile_ok)


def scan_tile(key_dim: int) -> Mapping[str, int]:
    """Columns of V a program, and of K a part. More than 128 keys of 16 columns do not fit into a warp's registers: such
    a state is spread over the warps by keys, and goes through shared memory."""
    if key_dim <= 128:
        return {"BLOCK_V": 64, "PART": 64, "num_warps": 4, "num_stages": 3}
    return {"BLOCK_V": 32, "PART": 256, "num_warps": 4, "num_stages": 3}
