"""The activation between the two products of a feed-forward block. References of the same names: `native_ops`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.configs.activation import GELU, RELU2, SILU, Activation, gate_constants
from sglang.srt.layers.triton_ops import pdl

SMALL_BATCH = 64
SMALL_BLOCK = {"BLOCK": 1024, "num_warps": 4}
LARGE_BLOCK = {"BLOCK": 2048, "num_warps": 4}


@triton.jit
def activated(
    gate, up, ALPHA: tl.constexpr, CUBIC: tl.constexpr, OFFSET: tl.constexpr, LIMIT: tl.constexpr,
    HAS_GATE: tl.constexpr,
):  # fmt: skip
    """`Activation` of fp32 values; LIMIT 0 clamps nothing, and a negative one clamps the result of the function instead
    of `gate`. Without a gate `gate` is what is squared."""
    if not HAS_GATE:
        positive = tl.maximum(gate, 0.0)
        return positive * positive
    else:
        if LIMIT > 0:
            gate = tl.minimum(gate, LIMIT)
            up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        slope = ALPHA * gate
        if CUBIC > 0:
            slope = gate * (ALPHA + CUBIC * gate * gate)
        if LIMIT < 0:
            up = tl.minimum(tl.maximum(up, LIMIT), -LIMIT)
            return (up + OFFSET) * tl.minimum(gate / (1.0 + tl.exp(-slope)), -LIMIT)
        return (up + OFFSET) * (gate / (1.0 + tl.exp(-slope)))


@triton.jit
def activation_kernel(
    x, out, row_stride, size, BLOCK: tl.constexpr, ALPHA: tl.constexpr, CUBIC: tl.constexpr, OFFSET: tl.constexpr,
    LIMIT: tl.constexpr, HAS_GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x [T, 2I] (gate, up), or without a gate [T, I] -> out [T, I] contiguous; one program a row and block of
    columns."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < size
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    gate = tl.load(x + row * row_stride + cols, mask=inside, other=0.0).to(tl.float32)
    up = gate
    if HAS_GATE:
        up = tl.load(x + row * row_stride + size + cols, mask=inside, other=0.0).to(tl.float32)
    result = activated(gate, up, ALPHA, CUBIC, OFFSET, LIMIT, HAS_GATE)
    tl.store(out + row * size + cols, result.to(out.dtype.element_ty), mask=inside)


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Returns the activation [..., I] of x [..., 2I], or without a gate of [..., I] (last dim contiguous)."""
    rows = x.reshape(-1, x.shape[-1])
    size = rows.shape[1] // (2 if activation.gated else 1)
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype, device=x.device)
    launch = SMALL_BLOCK if rows.shape[0] <= SMALL_BATCH else LARGE_BLOCK
    if rows.shape[0]:
        grid = (rows.shape[0], triton.cdiv(size, launch["BLOCK"]))
        activation_kernel[grid](
            rows, out, rows.stride(0), size, **launch, **gate_constants(activation), **pdl.options()
        )
    return out


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Returns silu(first half) * second half [..., I] of x [..., 2I]."""
    return activate(x, SILU)


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Returns gelu(first half) * second half [..., I] of x [..., 2I], with the tanh form of gelu."""
    return activate(x, GELU)


def relu2(x: torch.Tensor) -> torch.Tensor:
    """Returns relu(x) squared."""
    return activate(x, RELU2)
