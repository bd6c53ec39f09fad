"""Norms of groups of channels with a gate, and the output gate of attention. References have the same names."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops import pdl

GATE_BLOCK = 1024


@triton.jit
def gated_rmsnorm_kernel(
    x, gate, weight, out, rows, groups, size, gate_stride, weight_stride, eps, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, GATE_FIRST: tl.constexpr, SILU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x, out [T, groups, size] contiguous, gate the same in rows `gate_stride` apart, weight of group i from
    i * weight_stride on. `rows`: T * groups. Grid: (blocks of ROWS rows,)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    group = row % groups
    ok = (row < rows)[:, None] & (cols < size)[None, :]
    scale = tl.load(weight + group[:, None] * weight_stride + cols[None, :], mask=ok, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    values = tl.load(x + row[:, None] * size + cols[None, :], mask=ok, other=0.0).to(tl.float32)
    gate_offsets = (row // groups)[:, None] * gate_stride + group[:, None] * size + cols[None, :]
    own_gate = tl.load(gate + gate_offsets, mask=ok, other=0.0).to(tl.float32)
    factor = tl.sigmoid(own_gate)
    if SILU:
        factor *= own_gate
    if GATE_FIRST:
        values *= factor
    inverse = tl.rsqrt(tl.sum(values * values, 1) / size + eps)
    values *= inverse[:, None] * scale
    if not GATE_FIRST:
        values *= factor
    tl.store(out + row[:, None] * size + cols[None, :], values.to(out.dtype.element_ty), mask=ok)


@triton.jit
def attention_output_gate_kernel(x, gate, width, gate_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """x [T, width] contiguous, gate in rows `gate_stride` apart -> x * sigmoid(gate), in place. Grid: (T, blocks)."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = cols < width
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    values = tl.load(x + row * width + cols, mask=ok, other=0.0).to(tl.float32)
    values *= tl.sigmoid(tl.load(gate + row * gate_stride + cols, mask=ok, other=0.0).to(tl.float32))
    tl.store(x + row * width + cols, values.to(x.dtype.element_ty), mask=ok)


@triton.jit
def attention_head_gate_kernel(x, gate, heads, head_dim, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """x [T, heads * head_dim], gate [T, heads], both contiguous -> each head times sigmoid of its gate, in place. Grid:
    (T, blocks)."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    width = heads * head_dim
    ok = cols < width
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    values = tl.load(x + row * width + cols, mask=ok, other=0.0).to(tl.float32)
    values *= tl.sigmoid(tl.load(gate + row * heads + cols // head_dim, mask=ok, other=0.0).to(tl.float32))
    tl.store(x + row * width + cols, values.to(x.dtype.element_ty), mask=ok)


def norm_launch(num_rows: int, size: int) -> dict[str, int]:
    """Returns one row per program for few rows, else rows of about 1,024 elements together."""
    block = triton.next_power_of_2(size)
    rows = 1 if num_rows <= 1024 else max(1, 1024 // block)
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(8, max(1, rows * block // 256))}


def gated_rmsnorm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    gate_first: bool = False,
    sigmoid: bool = False,
) -> torch.Tensor:
    """Returns [T, groups * size] of x [T, groups, size] contiguous, gate [T, groups * size]: the norm of each group
    times silu(gate), or with `sigmoid` sigmoid(gate); with `gate_first` the gate is applied before the norm. weight:
    [size] for all groups, or [groups * size]."""
    num_tokens, groups, size = x.shape
    out = torch.empty((num_tokens, groups * size), dtype=x.dtype, device=x.device)
    rows = num_tokens * groups
    if rows:
        launch = norm_launch(rows, size)
        gated_rmsnorm_kernel[(triton.cdiv(rows, launch["ROWS"]),)](
            x, gate, weight, out, rows, groups, size, gate.stride(0), 0 if weight.shape[0] == size else size, eps,
            GATE_FIRST=gate_first, SILU=not sigmoid, **launch, **pdl.options(),
        )  # fmt: skip
    return out


def attention_output_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Writes x * sigmoid(gate) over x and returns it. x [T, Hq * D] contiguous, gate [T, Hq * D]."""
    num_tokens, width = x.shape
    if num_tokens:
        attention_output_gate_kernel[(num_tokens, triton.cdiv(width, GATE_BLOCK))](
            x, gate, width, gate.stride(0), BLOCK=GATE_BLOCK, num_warps=4, **pdl.options()
        )
    return x


def attention_head_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Writes x [T, Hq * D], each head times the sigmoid of its gate [T, Hq], over x and returns it. Both contiguous."""
    num_tokens, width = x.shape
    if num_tokens:
        heads = gate.shape[1]
        attention_head_gate_kernel[(num_tokens, triton.cdiv(width, GATE_BLOCK))](
            x, gate, heads, width // heads, BLOCK=GATE_BLOCK, num_warps=4, **pdl.options()
        )
    return x
