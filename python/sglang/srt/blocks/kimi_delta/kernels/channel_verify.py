"""Kimi delta attention, several tokens for each request, which may all be taken back: the state is read once, goes
through the tokens in registers, and is not written.

Each token is computed as `channel_step` computes one, and the state is rounded between tokens as it would be kept.
Memory-bound: heads * K * V elements of the state a request and layer. Reference: `reference.recurrence_verify`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.srt.blocks.kimi_delta.kernels.channel_decay import log_decay


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["slots"])
def channel_verify_kernel(
    q, k, v, a, b, a_log, dt_bias, states, slots, out, log_decays, betas, width, heads, token_stride, a_stride,
    b_stride, out_stride, slot_stride, scale, lower_bound, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, BOUNDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `channel_step_kernel` with `width` rows a request, q, k, v, a, b and out [B width, ..]; and of each row its
    decays and gate, log_decays [B width, heads, K], betas [B width, heads] fp32. Grid: (blocks of V, heads, B)."""
    head, request = tl.program_id(1), tl.program_id(2).to(tl.int64)
    k_cols = tl.arange(0, BLOCK_K)
    v_cols = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    k_ok, v_ok = k_cols < K, v_cols < V
    own_a_log = tl.load(a_log + head)
    own_bias = tl.load(dt_bias + head * K + k_cols, mask=k_ok, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(slots + request).to(tl.int64)
    first = request * width
    if slot <= 0:
        for i in range(width):
            empty = tl.zeros([BLOCK_V], dtype=out.dtype.element_ty)
            tl.store(out + (first + i) * out_stride + head * V + v_cols, empty, mask=v_ok)
        return
    tile = states + slot * slot_stride + head * K * V + k_cols[:, None] * V + v_cols[None, :]
    state = tl.load(tile, mask=k_ok[:, None] & v_ok[None, :], other=0.0).to(tl.float32)
    is_first = tl.program_id(0) == 0
    # Of the next row all is loaded before this one is computed.
    qk_offsets, v_offsets = head * K + k_cols, head * V + v_cols
    next_a = tl.load(a + first * a_stride + qk_offsets, mask=k_ok, other=0.0)
    next_b = tl.load(b + first * b_stride + head)
    next_key = tl.load(k + first * token_stride + qk_offsets, mask=k_ok, other=0.0)
    next_query = tl.load(q + first * token_stride + qk_offsets, mask=k_ok, other=0.0)
    next_value = tl.load(v + first * token_stride + v_offsets, mask=v_ok, other=0.0)
    for i in range(width):
        row = first + i
        own_a, beta = next_a, tl.sigmoid(next_b.to(tl.float32))
        key, query, value = next_key.to(tl.float32), next_query.to(tl.float32), next_value.to(tl.float32)
        after = first + tl.minimum(i + 1, width - 1)
        next_a = tl.load(a + after * a_stride + qk_offsets, mask=k_ok, other=0.0)
        next_b = tl.load(b + after * b_stride + head)
        next_key = tl.load(k + after * token_stride + qk_offsets, mask=k_ok, other=0.0)
        next_query = tl.load(q + after * token_stride + qk_offsets, mask=k_ok, other=0.0)
        next_value = tl.load(v + after * token_stride + v_offsets, mask=v_ok, other=0.0)
        decays = log_decay(own_a, own_a_log, own_bias, lower_bound, BOUNDED)
        tl.store(log_decays + (row * heads + head) * K + k_cols, decays, mask=k_ok & is_first)
        tl.store(betas + row * heads + head, beta, mask=is_first)
        state *= tl.exp(decays)[:, None]
        new = (value - tl.sum(state * key[:, None], 0)) * beta
        state += key[:, None] * new[None, :]
        result = tl.sum(state * query[:, None], 0) * scale
        tl.store(out + row * out_stride + head * V + v_cols, result.to(out.dtype.element_ty), mask=v_ok)
        state = state.to(states.dtype.element_ty).to(tl.float32)
