"""Kimi delta attention, one token for each request: the state is read once and written once, and nothing else is large.

    S = exp(g) * S, channel by channel of the keys;  x = beta * (v - k S);  S = S + k x;  o = scale * (q S)

Memory-bound: 2 * heads * K * V elements of the state a request and layer. Reference: `reference.recurrence_decode`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.srt.blocks.kimi_delta.kernels.channel_decay import log_decay


@triton.jit(do_not_specialize_on_alignment=["slots"])
def channel_step_kernel(
    q, k, v, a, b, a_log, dt_bias, states, slots, out, heads, token_stride, a_stride, b_stride, out_stride, slot_stride,
    scale, lower_bound, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    BOUNDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """q, k [B, heads, K], v [B, heads, V] in rows `token_stride` apart; a [B, heads, K]; b [B, heads]; states
    [slots, heads, K, V] -> out [B, heads, V]. Grid: (blocks of V, heads, B). Rows of slot 0 are padding: they touch no
    state, and their output is 0."""
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    k_cols = tl.arange(0, BLOCK_K)
    v_cols = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    k_ok, v_ok = k_cols < K, v_cols < V
    own_a_log = tl.load(a_log + head)
    own_bias = tl.load(dt_bias + head * K + k_cols, mask=k_ok, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(slots + row).to(tl.int64)
    out_row = out + row * out_stride + head * V + v_cols
    if slot <= 0:
        tl.store(out_row, tl.zeros([BLOCK_V], dtype=out.dtype.element_ty), mask=v_ok)
        return
    tile = states + slot * slot_stride + head * K * V + k_cols[:, None] * V + v_cols[None, :]
    tile_ok = k_ok[:, None] & v_ok[None, :]
    state = tl.load(tile, mask=tile_ok, other=0.0).to(tl.float32)

    own_a = tl.load(a + row * a_stride + head * K + k_cols, mask=k_ok, other=0.0)
    beta = tl.sigmoid(tl.load(b + row * b_stride + head).to(tl.float32))
    qk_offsets = row * token_stride + head * K + k_cols
    key = tl.load(k + qk_offsets, mask=k_ok, other=0.0).to(tl.float32)
    query = tl.load(q + qk_offsets, mask=k_ok, other=0.0).to(tl.float32)
    value = tl.load(v + row * token_stride + head * V + v_cols, mask=v_ok, other=0.0).to(tl.float32)

    state *= tl.exp(log_decay(own_a, own_a_log, own_bias, lower_bound, BOUNDED))[:, None]
    new = (value - tl.sum(state * key[:, None], 0)) * beta
    state += key[:, None] * new[None, :]
    tl.store(tile, state.to(states.dtype.element_ty), mask=tile_ok)
    result = tl.sum(state * query[:, None], 0) * scale
    tl.store(out_row, result.to(out.dtype.element_ty), mask=v_ok)
