"""Several tokens of a recurrence for each request, which may all be taken back: the state is read once, goes through
the tokens in registers, and is not written.

Each token is computed as `state_step` computes one, and the state is rounded between tokens as it would be kept.
Memory-bound: heads * K * V elements of the state a request and layer. Reference: `native.recurrence_verify`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.srt.layers.recurrent.triton_ops.gates import gates


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
    for i in range(width):
        row = first + i
        own_a = tl.load(a + row * ab_stride + head)
        own_b = own_a
        if DELTA:
            own_b = tl.load(b + row * ab_stride + head)
        qk_offsets = row * token_stride + (head // group) * K + k_cols
        key = tl.load(k + qk_offsets, mask=k_ok, other=0.0).to(tl.float32)
        query = tl.load(q + qk_offsets, mask=k_ok, other=0.0).to(tl.float32)
        value = tl.load(v + row * token_stride + head * V + v_cols, mask=v_ok, other=0.0).to(tl.float32)
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
