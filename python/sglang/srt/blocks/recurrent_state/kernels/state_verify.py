"""Several tokens of a recurrence for each request, which may all be taken back: the state is read once, goes through
the tokens in registers, and is not written.

Each token is computed as `state_step` computes one, and the state is rounded between tokens as it would be kept.
Memory-bound: heads * K * V elements of the state a request and layer. Reference: `reference.recurrence_verify`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.srt.blocks.recurrent_state.kernels.gates import gates

VERIFY_TILE = {"BLOCK_V": 8, "num_warps": 1}
"""One warp, so that sums over keys need no barrier, and so few columns that many programs hide what each waits for."""


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["slots"])
def state_verify_kernel(
    q, k, v, a, b, a_log, dt_bias, skip, states, slots, out, log_decays, betas, width, heads, group, token_stride,
    ab_stride, out_stride, slot_stride, scale, dt_min, dt_max, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, DELTA: tl.constexpr, HAS_SKIP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `state_step_kernel` with `width` rows a request, q, k, v, a, b and out [B width, ..]; and of each row its
    decay and gate, log_decays, betas [B width, heads] fp32. Grid: (blocks of V, heads, B)."""
    head, request = tl.program_id(1), tl.program_id(2).to(tl.int64)
    k_cols = tl.arange(0, BLOCK_K)
    v_cols = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    k_ok, v_ok = k_cols < K, v_cols < V
    own_a_log, own_bias = tl.load(a_log + head), tl.load(dt_bias + head)
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
    qk_offsets = (head // group) * K + k_cols
    v_offsets = head * V + v_cols
    next_a = tl.load(a + first * ab_stride + head)
    next_b = next_a
    if DELTA:
        next_b = tl.load(b + first * ab_stride + head)
    next_key = tl.load(k + first * token_stride + qk_offsets, mask=k_ok, other=0.0)
    next_query = tl.load(q + first * token_stride + qk_offsets, mask=k_ok, other=0.0)
    next_value = tl.load(v + first * token_stride + v_offsets, mask=v_ok, other=0.0)
    for i in range(width):
        row = first + i
        own_a, own_b = next_a, next_b
        key, query, value = next_key.to(tl.float32), next_query.to(tl.float32), next_value.to(tl.float32)
        after = first + tl.minimum(i + 1, width - 1)
        next_a = tl.load(a + after * ab_stride + head)
        next_b = next_a
        if DELTA:
            next_b = tl.load(b + after * ab_stride + head)
        next_key = tl.load(k + after * token_stride + qk_offsets, mask=k_ok, other=0.0)
        next_query = tl.load(q + after * token_stride + qk_offsets, mask=k_ok, other=0.0)
        next_value = tl.load(v + after * token_stride + v_offsets, mask=v_ok, other=0.0)
        log_decay, beta = gates(own_a, own_b, own_a_log, own_bias, dt_min, dt_max, DELTA)
        tl.store(log_decays + row * heads + head, log_decay, mask=is_first)
        tl.store(betas + row * heads + head, beta, mask=is_first)
        state *= tl.exp(log_decay)
        new = value
        if DELTA:
            new = value - tl.sum(state * key[:, None], 0)
        state += key[:, None] * (new * beta)[None, :]
        result = tl.sum(state * query[:, None], 0) * scale
        if HAS_SKIP:
            result += value * tl.load(skip + head).to(tl.float32)
        tl.store(out + row * out_stride + head * V + v_cols, result.to(out.dtype.element_ty), mask=v_ok)
        state = state.to(states.dtype.element_ty).to(tl.float32)
