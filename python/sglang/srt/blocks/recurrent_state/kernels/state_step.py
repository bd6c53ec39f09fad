"""One token of a recurrence for each request: the state is read once and written once, and nothing else is large.

    S = exp(g) * S;  x = beta * (v - k S)  (delta rule)  or  beta * v;  S = S + k x;  o = scale * (q S) [+ skip * v]

Memory-bound: 2 * heads * K * V elements of the state a request and layer. Reference: `reference.recurrence_decode`.
"""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl

from sglang.srt.blocks.recurrent_state.kernels.gates import gates

STEP_TILES: tuple[Mapping[str, int], ...] = ({"BLOCK_V": 16, "num_warps": 2}, {"BLOCK_V": 64, "num_warps": 8})
"""For few programs (parallelism), and for many (rows of a state are read in longer pieces)."""


@triton.jit(do_not_specialize_on_alignment=["slots"])
def state_step_kernel(
    q, k, v, a, b, a_log, dt_bias, skip, states, slots, out, heads, group, token_stride, ab_stride, out_stride,
    slot_stride, scale, dt_min, dt_max, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, DELTA: tl.constexpr, HAS_SKIP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """q, k [B, heads / group, K], v [B, heads, V] in rows `token_stride` apart; a, b [B, heads]; states
    [slots, heads, K, V] -> out [B, heads, V]. Grid: (blocks of V, heads, B). Rows of slot 0 are padding: they touch no
    state, and their output is 0."""
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    k_cols = tl.arange(0, BLOCK_K)
    v_cols = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    k_ok, v_ok = k_cols < K, v_cols < V
    own_a_log, own_bias = tl.load(a_log + head), tl.load(dt_bias + head)
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

    own_a = tl.load(a + row * ab_stride + head)
    own_b = own_a
    if DELTA:
        own_b = tl.load(b + row * ab_stride + head)
    log_decay, beta = gates(own_a, own_b, own_a_log, own_bias, dt_min, dt_max, DELTA)
    qk_offsets = row * token_stride + (head // group) * K + k_cols
    key = tl.load(k + qk_offsets, mask=k_ok, other=0.0).to(tl.float32)
    query = tl.load(q + qk_offsets, mask=k_ok, other=0.0).to(tl.float32)
    value = tl.load(v + row * token_stride + head * V + v_cols, mask=v_ok, other=0.0).to(tl.float32)

    state *= tl.exp(log_decay)
    new = value
    if DELTA:
        new = value - tl.sum(state * key[:, None], 0)
    state += key[:, None] * (new * beta)[None, :]
    tl.store(tile, state.to(states.dtype.element_ty), mask=tile_ok)
    result = tl.sum(state * query[:, None], 0) * scale
    if HAS_SKIP:
        result += value * tl.load(skip + head).to(tl.float32)
    tl.store(out_row, result.to(out.dtype.element_ty), mask=v_ok)


def step_tile(batch: int, heads: int, value_dim: int, num_sms: int) -> Mapping[str, int]:
    """Returns the narrow tile if the wide one would leave SMs without work."""
    narrow, wide = STEP_TILES
    return wide if batch * heads * triton.cdiv(value_dim, wide["BLOCK_V"]) >= 4 * num_sms else narrow
