"""SiLU gate. Reference: `native_ops.silu_and_mul`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops import pdl

SMALL_BATCH = 64
SMALL_BLOCK = {"BLOCK": 1024, "num_warps": 4}
LARGE_BLOCK = {"BLOCK": 2048, "num_warps": 4}


@triton.jit
def silu_and_mul_kernel(gate_up, out, row_stride, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """gate_up [T, 2I] -> out [T, I] contiguous; one program a row and block of columns."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < size
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    gate = tl.load(gate_up + row * row_stride + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + size + cols, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * size + cols, result.to(out.dtype.element_ty), mask=inside)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [..., 2I] (last dim contiguous) -> silu(first half) * second half [..., I]."""
    rows = gate_up.reshape(-1, gate_up.shape[-1])
    size = rows.shape[1] // 2
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    launch = SMALL_BLOCK if rows.shape[0] <= SMALL_BATCH else LARGE_BLOCK
    if rows.shape[0]:
        grid = (rows.shape[0], triton.cdiv(size, launch["BLOCK"]))
        silu_and_mul_kernel[grid](rows, out, rows.stride(0), size, **launch, **pdl.options())
    return out
