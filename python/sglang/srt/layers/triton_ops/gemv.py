"""y = x @ w^T for one row of x: the time is that of reading w once. Reference: `torch.nn.functional.linear`.

Threads along K multiply and add, without matrix instructions. On an H200 in bf16 (benchmark/kernels/elementwise/
bench_gemv.py) 10-14% faster than cuBLAS for Qwen3-8B's output and down projections, up to three times for Qwen3-0.6B's
small ones, within 3% elsewhere.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops import pdl

GemvTile = dict[str, int]
TILE: GemvTile = {"BLOCK_N": 8, "BLOCK_K": 512, "num_warps": 4}


@triton.jit
def gemv_kernel(
    x,  # [K]
    w,  # [N, K]
    out,  # [N]
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row of x. BLOCK_K divides K."""
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.where(cols < N, cols, 0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    w_at = w + rows[:, None] * K + k[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    weight = tl.load(w_at, eviction_policy="evict_first")
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for start in range(0, K, BLOCK_K):
        # The next block of weights is on its way while this one is multiplied.
        more = (start + BLOCK_K + k < K)[None, :]
        next_weight = tl.load(w_at + start + BLOCK_K, mask=more, other=0.0, eviction_policy="evict_first")
        total += weight.to(tl.float32) * tl.load(x + start + k).to(tl.float32)[None, :]
        weight = next_weight
    tl.store(out + cols, tl.sum(total, axis=1).to(out.dtype.element_ty), mask=cols < N)


def supports(x: torch.Tensor, w: torch.Tensor, tile: GemvTile = TILE) -> bool:
    """One row, 2-byte floats, K a multiple of BLOCK_K."""
    size = x.shape[-1]
    return x.numel() == size and size % tile["BLOCK_K"] == 0 and x.element_size() == 2 and w.is_contiguous()


def gemv(x: torch.Tensor, w: torch.Tensor, tile: GemvTile = TILE, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """x [..., K] with one row, w [N, K] contiguous -> [..., N] in the dtype of x, or in `out_dtype`."""
    num_cols, size = w.shape
    out = torch.empty((*x.shape[:-1], num_cols), dtype=out_dtype or x.dtype, device=x.device)
    grid = (triton.cdiv(num_cols, tile["BLOCK_N"]),)
    gemv_kernel[grid](x, w, out, num_cols, size, **tile, **pdl.options())
    return out


def linear(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """As `torch.nn.functional.linear` (cuBLAS), which serves what the kernel does not. With `out_dtype` fp32 (x [R, K],
    no bias) the sums are not rounded to the operands' type."""
    if bias is None and supports(x, w):
        return gemv(x, w, out_dtype=out_dtype)
    if out_dtype is None:
        return F.linear(x, w, bias)
    return torch.mm(x, w.T, out_dtype=out_dtype)
