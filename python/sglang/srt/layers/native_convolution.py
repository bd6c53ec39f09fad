"""Short convolutions in plain torch: those of the CPU, and the reference that others are tested against.

Math is done in fp32, and in fp64 where the rows are.
"""

from __future__ import annotations

import torch

from sglang.srt.layers.compressed.step import TokenRequests
from sglang.srt.layers.convolution_kernels import ConvolutionKernels
from sglang.srt.layers.ngrams.native import keep_last, token_before, wide


def convolve(
    rows: torch.Tensor, weight: torch.Tensor, kept: torch.Tensor, requests: TokenRequests, out: torch.Tensor
) -> None:
    """rows [T, C] -> out [T, C]: rows plus their causal convolution by weight [C, taps], channel by channel. kept
    [requests, R, C]: rows of the last R >= taps - 1 tokens of each request before the step, of position p at p % R."""
    taps, factors = weight.shape[1], wide(weight)
    total, zero = wide(rows) * (1.0 + factors[:, -1]), rows.new_zeros(())
    for tap in range(1, taps):
        total = total + wide(token_before(rows, kept, requests, tap, zero)) * factors[:, taps - 1 - tap]
    out.copy_(total)


SHORT_CONVOLUTION = ConvolutionKernels(convolve, keep_last)
