"""Kimi delta attention: sums of the log decays of each channel since the start of a chunk.

    -exp(a_log) * softplus(a + dt_bias)                   of a token, or with a lower bound
    lower_bound * sigmoid(exp(a_log) * (a + dt_bias))

Reference: `reference.channel_decay`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.srt.blocks.recurrent_state.kernels.gates import softplus
from sglang.srt.blocks.recurrent_state.kernels.sequences import locate

TILE = {"num_warps": 8, "num_stages": 1}


@triton.jit
def log_decay(a, a_log, dt_bias, lower_bound, BOUNDED: tl.constexpr):
    """-> the log of the decay, fp32, of the shape of `a`."""
    shifted = a.to(tl.float32) + dt_bias.to(tl.float32)
    rate = tl.exp(a_log.to(tl.float32))
    if BOUNDED:
        return lower_bound * tl.sigmoid(rate * shifted)
    return -rate * softplus(shifted)


@triton.jit(do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=["start_loc"])
def channel_decay_kernel(
    a, a_log, dt_bias, start_loc, decay, num_seqs, heads, lower_bound, K: tl.constexpr, BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """a [T, heads, K], a_log [heads], dt_bias [heads, K] -> decay [T, heads, K] fp32. Grid: (chunks * heads,)."""
    pid = tl.program_id(0)
    head = pid % heads
    _, start, length, first = locate(start_loc, num_seqs, pid // heads, CHUNK)
    if (first < 0) | (first >= length):
        return
    row, cols = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    token = (start + first + row).to(tl.int64)
    inside = (first + row < length)[:, None] & (cols < K)[None, :]
    offsets = (token * heads + head)[:, None] * K + cols[None, :]
    gate = tl.load(a + offsets, mask=inside, other=0.0)
    bias = tl.load(dt_bias + head * K + cols, mask=cols < K, other=0.0)
    steps = log_decay(gate, tl.load(a_log + head), bias[None, :], lower_bound, BOUNDED)
    tl.store(decay + offsets, tl.cumsum(tl.where(inside, steps, 0.0), 0), mask=inside)
