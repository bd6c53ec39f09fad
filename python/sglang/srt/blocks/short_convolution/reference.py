"""Short convolutions in plain torch: the CPU kernels, and the reference for tests.

Math is done in fp32, or in fp64 for fp64 rows.
"""

from __future__ import annotations

import torch

from sglang.srt.blocks.short_convolution.convolution_kernels import ConvolutionKernels
from sglang.srt.kernels.op import Op
from sglang.srt.layers.compressed_step import TokenRequests
from sglang.srt.layers.last_rows import keep_last, token_before, wide


def convolve(
    rows: torch.Tensor, weight: torch.Tensor, kept: torch.Tensor, requests: TokenRequests, out: torch.Tensor
) -> None:
    """Fills out [T, C] with rows [T, C] plus their causal depthwise convolution by weight [C, taps]. kept [requests, R,
    C]: rows of the last R >= taps - 1 tokens of each request before the step, position p at p % R."""
    taps, factors = weight.shape[1], wide(weight)
    total, zero = wide(rows) * (1.0 + factors[:, -1]), rows.new_zeros(())
    for tap in range(1, taps):
        total = total + wide(token_before(rows, kept, requests, tap, zero)) * factors[:, taps - 1 - tap]
    out.copy_(total)


KERNELS = ConvolutionKernels(convolve, keep_last)

SHORT_CONVOLUTION = Op("short_convolution", KERNELS)
