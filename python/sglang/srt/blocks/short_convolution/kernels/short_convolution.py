"""x plus a causal convolution of x over a few tokens, channel by channel.

    out[t, c] = x[t, c] + sum over j < TAPS of weight[c, TAPS - 1 - j] * x[t - j, c]

A request keeps its last KEPT >= TAPS - 1 inputs, position p at p % KEPT, which `keep_last` stores.

Reference: `reference.convolve`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.blocks.short_convolution.convolution_kernels import ConvolutionKernels
from sglang.srt.layers.compressed_step import TokenRequests
from sglang.srt.layers.triton_ops import pdl
from sglang.srt.layers.triton_ops.keep_last import keep_last

LAUNCH = {"BLOCK": 256, "num_warps": 2}


@triton.jit
def convolve_kernel(
    rows,  # [T, width]
    weight,  # [width, TAPS]
    kept,  # [requests, KEPT, width]
    slots,  # [T]
    positions,  # [T]
    firsts,  # [T]
    out,  # [T, width], rows may lie apart
    width,
    out_stride,
    TAPS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token, channels)."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    position = tl.load(positions + token).to(tl.int64)
    first = tl.load(firsts + token).to(tl.int64)
    state = kept + tl.load(slots + token).to(tl.int64) * KEPT * width
    total = tl.load(rows + token * width + cols, mask=inside, other=0.0).to(tl.float32)
    for tap in tl.static_range(TAPS):
        at = position - tap
        # A token of this step, or one before it in the state; there is neither before a request's first token.
        row = tl.load(rows + (token - tap) * width + cols, mask=(at >= first) & inside, other=0.0).to(tl.float32)
        if tap > 0:
            earlier = (at >= 0) & (at < first) & inside
            row += tl.load(state + (at % KEPT) * width + cols, mask=earlier, other=0.0).to(tl.float32)
        total += row * tl.load(weight + cols * TAPS + (TAPS - 1 - tap), mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * out_stride + cols, total.to(out.dtype.element_ty), mask=inside)


def convolve(
    rows: torch.Tensor, weight: torch.Tensor, kept: torch.Tensor, requests: TokenRequests, out: torch.Tensor
) -> None:
    """Does as the reference. All contiguous, but the row stride of `out` is free."""
    num_tokens, width = rows.shape
    if num_tokens:
        convolve_kernel[(num_tokens, triton.cdiv(width, LAUNCH["BLOCK"]))](
            rows, weight, kept, requests.slots, requests.positions, requests.firsts, out, width, out.stride(0),
            TAPS=weight.shape[1], KEPT=kept.shape[1], **LAUNCH, **pdl.options(),
        )  # fmt: skip


KERNELS = ConvolutionKernels(convolve, keep_last)
