"""Second half of a chunked recurrence, as `chunk_scan`, with the state in the registers of the warp that needs it.

All is computed transposed. S^T and x^T leave one product as the left side of the next, in the same registers, where
each warp has 16 columns of V (the last of TILES): nothing goes from warp to warp while the state goes on, and what
comes from memory are right sides, on their way a chunk ahead. (x begins as a product with 1 for the same reason.)
Triton cuts products that follow one another by rows where none of them has more columns than rows, which is why keys
are taken in parts. A warp has room for 128 keys and chunks of 32 tokens.

Reference: the recurrence itself, `reference.recurrence`.
"""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl

from sglang.srt.blocks.recurrent_state.kernels.chunk_scan import inside_block

CHUNK = 32
"""Tokens that are computed at once."""
MAX_KEYS = 128
TILES = (
    {"BLOCK_V": 16, "PART": 128, "num_warps": 4, "num_stages": 3},
    {"BLOCK_V": 32, "PART": 128, "num_warps": 4, "num_stages": 3},
    {"BLOCK_V": 64, "PART": 64, "num_warps": 4, "num_stages": 3},
)
"""With fewer columns each warp has a share of the keys instead, and what goes on goes through shared memory: that takes
less time for a chunk, and reads scores, keys, queries and w more often."""
LOCAL_TILE = {"num_warps": 4, "num_stages": 2}
"""Of `chunk_local`, whose matrices are half as wide as with chunks of 64."""


def scan_tile(states: int, value_dim: int, num_sms: int) -> Mapping[str, int]:
    """Returns the fewest columns with which every program has an SM, else the most. For a prompt of 8,192 tokens and 16
    heads of a gated delta net (128 programs with 16 columns) an H100 of 132 SMs took 343 us with 16 and 444 with 64;
    for four of 2,048 tokens 286 and 218."""
    alone = (tile for tile in TILES if states * triton.cdiv(value_dim, tile["BLOCK_V"]) <= num_sms)
    return next(alone, TILES[-1])


@triton.jit(do_not_specialize_on_alignment=["start_loc", "prefix_lens", "initial_slots", "slots"])
def register_scan_kernel(
    q, k, v, scores, decay, beta, u, w, skip, states, initial_slots, slots, prefix_lens, start_loc, out, heads, group,
    token_stride, out_stride, slot_stride, scale, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr, DELTA: tl.constexpr, HAS_SKIP: tl.constexpr,
):  # fmt: skip
    """Arguments and grid of `chunk_scan_kernel`."""
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
        read = tl.load(before + part * WIDTH * V + tile, mask=tile_ok, other=0.0).to(tl.float32)
        state = state + (read,)  # type: ignore[assignment]
    dtype = q.dtype.element_ty
    unit = (row[:, None] == row[None, :]).to(dtype)
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

    for first in range(0, length, CHUNK):
        inside = row < length - first
        v_mask = inside_block(inside, v_cols, V, BLOCK_V)
        g = tl.load(decay + of_head + row * heads, mask=inside, other=0.0)
        last = tl.load(decay + of_head + (tl.minimum(CHUNK, length - first) - 1) * heads)
        taken = tl.zeros([BLOCK_V, CHUNK], dtype=tl.float32)
        result = tl.zeros([BLOCK_V, CHUNK], dtype=tl.float32)
        for part in tl.static_range(PARTS):
            mask = inside_block(inside, part * WIDTH + k_cols, K, WIDTH)
            rounded = state[part].to(dtype)  # type: ignore[var-annotated]
            if DELTA:
                own_w = tl.load(w + of_head * K + part * WIDTH + w_offsets, mask=mask, other=0.0)
                taken = tl.dot(rounded, tl.trans(own_w), taken)
            queries = tl.load(q + qk_base + part * WIDTH + qk_offsets, mask=mask, other=0.0)
            result = tl.dot(rounded, tl.trans(queries), result)
        result *= (tl.exp(g) * scale)[None, :]
        if DELTA:
            own_u = tl.load(u + of_head * V + u_offsets, mask=v_mask, other=0.0)
            values = tl.dot(tl.trans(own_u), unit, -taken)
        else:
            own_v = tl.load(v_base + v_offsets, mask=v_mask, other=0.0)
            own_beta = tl.load(beta + of_head + row * heads, mask=inside, other=0.0)
            raw = tl.dot(tl.trans(own_v), unit)
            values = raw * own_beta[None, :]
            if HAS_SKIP:
                result += raw * tl.load(skip + head).to(tl.float32)
        own_scores = tl.load(scores + of_head * CHUNK + score_offsets, mask=inside[:, None], other=0.0)
        result = tl.dot(values.to(dtype), tl.trans(own_scores), result)
        # Stored before the state goes on, or it takes registers that are not there.
        tl.store(out_base + out_offsets, tl.trans(result.to(out.dtype.element_ty)), mask=v_mask)
        faded = (values * tl.exp(last - g)[None, :]).to(dtype)
        after = ()
        for part in tl.static_range(PARTS):
            mask = inside_block(inside, part * WIDTH + k_cols, K, WIDTH)
            keys = tl.load(k + qk_base + part * WIDTH + qk_offsets, mask=mask, other=0.0)
            grown = tl.dot(faded, keys, state[part] * tl.exp(last))
            after = after + (grown,)  # type: ignore[assignment]
        state = after
        qk_base += CHUNK * token_stride
        v_base += CHUNK * token_stride
        out_base += CHUNK * out_stride
        of_head += CHUNK * heads

    behind = states + tl.load(slots + seq).to(tl.int64) * slot_stride + head * K * V
    for part in tl.static_range(PARTS):
        tile_ok = (v_cols < V)[:, None] & (part * WIDTH + k_cols < K)[None, :]
        tl.store(behind + part * WIDTH * V + tile, state[part].to(states.dtype.element_ty), mask=tile_ok)
