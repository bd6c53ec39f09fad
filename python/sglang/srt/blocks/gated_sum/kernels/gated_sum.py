"""A weighted residual sum between two blocks, in one launch. Reference: `reference.gated_sum`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops import pdl
from sglang.srt.layers.triton_ops.norm import row_launch


@triton.jit
def gated_sum_kernel(
    stream,  # [T, size], in place
    out,  # [T, size]
    scale,  # [size] fp32
    gate,  # [size] fp32
    weight,  # [size]
    normed,  # [T, size]
    stream_stride,
    out_stride,
    size,
    eps_after,
    eps,
    HAS_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program: one token."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < size
    # What does not wait for the block's output is read first.
    logit = tl.load(gate + cols, mask=inside, other=0.0)
    after = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(logit)
    kept = tl.sqrt(tl.maximum(tl.sigmoid(-logit) * (1.0 + share), 0.001))
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    dtype = stream.dtype.element_ty
    values = tl.load(out + row * out_stride + cols, mask=inside, other=0.0).to(tl.float32)
    if HAS_SCALE:
        values = (values * tl.load(scale + cols, mask=inside, other=0.0)).to(dtype).to(tl.float32)
    values *= tl.rsqrt(tl.sum(values * values) / size + eps_after)
    values = values.to(dtype).to(tl.float32)
    before = tl.load(stream + row * stream_stride + cols, mask=inside, other=0.0).to(tl.float32)
    # The norm sees the stream as the next block will read it.
    rounded = (kept * before + share * values).to(dtype)
    tl.store(stream + row * stream_stride + cols, rounded, mask=inside)
    total = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(total * total) / size + eps)
    tl.store(normed + row * size + cols, (total * inverse * after).to(dtype), mask=inside)


def gated_sum(
    stream: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor | None,
    gate: torch.Tensor,
    eps_after: float,
    weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Does as the reference. The strides of rows are free."""
    num_tokens, size = stream.shape
    normed = torch.empty((num_tokens, size), dtype=stream.dtype, device=stream.device)
    if num_tokens:
        gated_sum_kernel[(num_tokens,)](
            stream, out, gate if scale is None else scale, gate, weight, normed, stream.stride(0), out.stride(0), size,
            eps_after, eps, HAS_SCALE=scale is not None, **row_launch(size), **pdl.options(),
        )  # fmt: skip
    return normed
