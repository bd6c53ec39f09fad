"""Biases of scores by distance, for the attention kernels that add them (Inkling)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def biased_scores(q, k, scale, bias_base, bias_rows, q_pos, kv_pos, extent):
    """Products of q [M, D] and k [N, D], plus the bias of each distance q_pos [M] - kv_pos [N] from 0 to extent - 1,
    divided by `scale`, which multiplies both and carries log2(e). bias_rows [M]: where the biases of a row begin behind
    `bias_base`, in 32 bits. The biases are what the products are added to: beside them they would take registers that
    prompts do not have."""
    distance = q_pos[:, None] - kv_pos[None, :]
    inside = (distance >= 0) & (distance < extent)
    bias = tl.load(bias_base + (bias_rows[:, None] + distance), mask=inside, other=0.0).to(tl.float32)
    return tl.dot(q, tl.trans(k), bias * (1.4426950408889634 / scale))
