"""Residual addition, RMSNorm and e4m3 quantization of the normed row in one launch: what `fused_add_rmsnorm` and
`quantize_activation` give one after the other, bit for bit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.quantization.activations import QuantizedActivations, RowForm
from sglang.srt.layers.triton_ops import pdl
from sglang.srt.layers.triton_ops.norm import row_launch
from sglang.srt.layers.triton_ops.quantize import quotient

_LIMIT = tl.constexpr(448.0)
_TINY = tl.constexpr(1e-12)
GROUP = 128


@triton.jit
def add_rmsnorm_quantize_kernel(
    x,  # [T, H]: the norm is written over it
    residual,  # [T, H]: the sum is written over it
    weight,  # [H]
    data,  # [T, H] e4m3
    scale,  # [T], GROUP < BLOCK: [T, num_groups] fp32
    row_stride,
    residual_stride,
    size,
    num_groups,
    eps,
    GROUP: tl.constexpr,  # columns with one scale; BLOCK: all of them
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < size
    factor = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    dtype = x.dtype.element_ty
    total = tl.load(x + row * row_stride + cols, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(residual + row * residual_stride + cols, mask=inside, other=0.0).to(tl.float32)
    rounded = total.to(dtype)
    tl.store(residual + row * residual_stride + cols, rounded, mask=inside)
    values = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values) / size + eps)
    normed = (values * inverse * factor).to(dtype)
    tl.store(x + row * row_stride + cols, normed, mask=inside)
    # Quantized is what the next layer would read.
    values = normed.to(tl.float32)
    if GROUP == BLOCK:
        step = tl.maximum(tl.math.div_rn(tl.max(tl.abs(values)), _LIMIT), _TINY)
        tl.store(scale + row, step)
        scaled = quotient(values, step, tl.math.div_rn(1.0, step))
    else:
        groups = tl.reshape(values, (BLOCK // GROUP, GROUP))
        steps = tl.maximum(tl.math.div_rn(tl.max(tl.abs(groups), axis=1), _LIMIT), _TINY)
        group = tl.arange(0, BLOCK // GROUP)
        tl.store(scale + row * num_groups + group, steps, mask=group < num_groups)
        scaled = tl.reshape(quotient(groups, steps[:, None], tl.math.div_rn(1.0, steps)[:, None]), (BLOCK,))
    tl.store(data + row * size + cols, scaled.to(data.dtype.element_ty), mask=inside)


def launch(size: int, form: RowForm) -> dict[str, int]:
    """Constants for rows of `size` elements."""
    launch = row_launch(size)
    return {**launch, "GROUP": launch["BLOCK"] if form == "token" else min(GROUP, launch["BLOCK"])}


def add_rmsnorm_quantize(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, form: RowForm
) -> tuple[QuantizedActivations, torch.Tensor]:
    """Returns (norm of x + residual, x + residual), written over x and residual [T, H]; the norm is also quantized as
    `form` says."""
    num_tokens, size = x.shape
    num_groups = 1 if form == "token" else triton.cdiv(size, GROUP)
    data = torch.empty((num_tokens, size), dtype=torch.float8_e4m3fn, device=x.device)
    shape = (num_tokens,) if form == "token" else (num_tokens, num_groups)
    scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    if num_tokens:
        add_rmsnorm_quantize_kernel[(num_tokens,)](
            x, residual, weight, data, scale, x.stride(0), residual.stride(0), size, num_groups, eps,
            **launch(size, form), **pdl.options(),
        )  # fmt: skip
    return QuantizedActivations(x, data, scale, form), residual
