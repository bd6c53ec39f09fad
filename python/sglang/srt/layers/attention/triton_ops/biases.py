"""Biases of scores by distance, for the attention kernels that add them (Inkling)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def biased_scores(scores, scale, bias_rows, q_pos, kv_pos, extent):
    """scores [M, N] times `scale`, which carries log2(e), plus the bias of each distance q_pos [M] - kv_pos [N] from 0
    to extent - 1: in the base-2 domain. bias_rows [M]: where the biases of a row begin."""
    distance = q_pos[:, None] - kv_pos[None, :]
    inside = (distance >= 0) & (distance < extent)
    bias = tl.load(bias_rows[:, None] + distance, mask=inside, other=0.0).to(tl.float32)
    return scores * scale + bias * 1.4426950408889634
