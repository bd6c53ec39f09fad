"""RMS norm, alone and fused with the residual addition. References: those of the same names in `native_ops`.

One program a row: the row is read once and stays in registers between the sum of squares and the scaling.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops import pdl


@triton.jit
def rmsnorm_kernel(x, weight, out, row_stride, size, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """x [T, H] -> out [T, H] contiguous."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < size
    # The weight does not wait for x, so its load is issued first.
    scale = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    values = tl.load(x + row * row_stride + cols, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values) / size + eps)
    tl.store(out + row * size + cols, (values * inverse * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit
def fused_add_rmsnorm_kernel(
    x, residual, weight, row_stride, residual_stride, size, eps, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """residual += x; x = norm(residual), in place."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < size
    scale = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    dtype = x.dtype.element_ty
    total = tl.load(x + row * row_stride + cols, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(residual + row * residual_stride + cols, mask=inside, other=0.0).to(tl.float32)
    # The norm sees the sum as the next layer will read it.
    rounded = total.to(dtype)
    tl.store(residual + row * residual_stride + cols, rounded, mask=inside)
    values = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values) / size + eps)
    tl.store(x + row * row_stride + cols, (values * inverse * scale).to(dtype), mask=inside)


def row_launch(size: int) -> dict[str, int]:
    """Returns block and warps for rows of `size` elements: 8 elements (16 bytes of bf16) per thread, up to 16 warps."""
    block = triton.next_power_of_2(size)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 256))}


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns the RMS norm of x [..., H] (last dim contiguous) times weight [H]."""
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows.shape[0]:
        rmsnorm_kernel[(rows.shape[0],)](
            rows, weight, out, rows.stride(0), size, eps, **row_launch(size), **pdl.options()
        )
    return out


def fused_add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (norm of x + residual, x + residual), [T, H] each, written over x and residual."""
    num_tokens, size = x.shape
    if num_tokens:
        fused_add_rmsnorm_kernel[(num_tokens,)](
            x, residual, weight, x.stride(0), residual.stride(0), size, eps, **row_launch(size), **pdl.options()
        )
    return x, residual
