"""Rows of the vocabulary that a rank holds. Reference: `native_ops.embedding_rows`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops import pdl

LAUNCH = {"BLOCK": 1024, "num_warps": 4}


@triton.jit(do_not_specialize=["first", "num_rows"])
def embedding_rows_kernel(ids, weight, out, first, num_rows, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """ids [T] int64, weight [num_rows, H] -> out [T, H], both contiguous; one program a token and block of columns."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < size
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.load(ids + token) - first
    of_rank = (row >= 0) & (row < num_rows)
    values = tl.load(weight + row * size + cols, mask=inside & of_rank, other=0.0)
    tl.store(out + token * size + cols, values, mask=inside)


def embedding_rows(ids: torch.Tensor, weight: torch.Tensor, first: int) -> torch.Tensor:
    """Returns [T, H] of ids [T] int64 from weight [N, H] contiguous, on the device or in pinned host memory: the rows
    of tokens from `first` on; zeros for other tokens."""
    num_rows, size = weight.shape
    out = torch.empty((len(ids), size), dtype=weight.dtype, device=ids.device)
    if len(ids):
        grid = (len(ids), triton.cdiv(size, LAUNCH["BLOCK"]))
        embedding_rows_kernel[grid](ids, weight, out, first, num_rows, size, **LAUNCH, **pdl.options())
    return out
