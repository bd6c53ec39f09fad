"""y = x @ w^T for one row of x: the time is that of reading w once. Reference: `torch.nn.functional.linear`.

Threads along K multiply and add, without matrix instructions, and the first weights are on their way before the kernel
waits for x. A bias is added in the same launch, and weights in fp32 (of routers) need no copy of x in fp32.

On an H200 in bf16 (lab/kernels/elementwise/bench_gemv.py) 10-14% faster than cuBLAS for Qwen3-8B's output and
down projections, up to three times for Qwen3-0.6B's small ones, within 3% elsewhere. Routers take 1.1 to 2 us.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops import pdl, skinny_gemm

GemvTile = dict[str, int]
TILE: GemvTile = {"BLOCK_N": 8, "BLOCK_K": 512, "num_warps": 4}
WHOLE_ROW_TILES: tuple[GemvTile, ...] = (
    {"BLOCK_N": 2, "BLOCK_K": 2048, "num_warps": 4},
    {"BLOCK_N": 2, "BLOCK_K": 4096, "num_warps": 8},
    {"BLOCK_N": 2, "BLOCK_K": 8192, "num_warps": 8},
)
WHOLE_ROWS = 1024
"""Rows of w up to which a program has two, and loads all of them before it waits for x: with eight each, a router's 128
would be 16 programs, which read one step after the other. Longer rows than the last tile's take several steps."""
MIN_K, ROW_MULTIPLE = 512, 16


@triton.jit
def gemv_kernel(
    x,  # [K]
    w,  # [N, K]
    bias,  # HAS_BIAS: [N]
    out,  # [N]
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,  # BLOCK_K divides K
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row of x."""
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.where(cols < N, cols, 0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    w_at = w + rows[:, None] * K + k[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    if EVEN_K:
        weight = tl.load(w_at, eviction_policy="evict_first")
    else:
        weight = tl.load(w_at, mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for start in range(0, K, BLOCK_K):
        # The next block of weights is on its way while this one is multiplied.
        more = (start + BLOCK_K + k < K)[None, :]
        next_weight = tl.load(w_at + start + BLOCK_K, mask=more, other=0.0, eviction_policy="evict_first")
        if EVEN_K:
            part = tl.load(x + start + k)
        else:
            part = tl.load(x + start + k, mask=start + k < K, other=0.0)
        total += weight.to(tl.float32) * part.to(tl.float32)[None, :]
        weight = next_weight
    sums = tl.sum(total, axis=1)
    if HAS_BIAS:
        sums += tl.load(bias + rows).to(tl.float32)
    tl.store(out + cols, sums.to(out.dtype.element_ty), mask=cols < N)


def supports(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Returns whether x is one row of 2-byte floats, long enough, and rows of w begin at multiples of 16 elements."""
    size = x.shape[-1]
    one_row = x.numel() == size and x.element_size() == 2
    return one_row and size >= MIN_K and size % ROW_MULTIPLE == 0 and w.is_contiguous()


def tile_for(num_cols: int, size: int) -> GemvTile:
    """Returns the tile for w [num_cols, size]."""
    if num_cols > WHOLE_ROWS:
        return TILE
    return next((tile for tile in WHOLE_ROW_TILES if tile["BLOCK_K"] >= size), WHOLE_ROW_TILES[-1])


def gemv(
    x: torch.Tensor,
    w: torch.Tensor,
    tile: GemvTile | None = None,
    out_dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns x @ w^T + bias for one row of x [..., K], w [N, K] contiguous in x's dtype or fp32, bias [N], in x's
    dtype or `out_dtype`. `tile` forces one."""
    num_cols, size = w.shape
    tile = tile or tile_for(num_cols, size)
    out = torch.empty((*x.shape[:-1], num_cols), dtype=out_dtype or x.dtype, device=x.device)
    grid = (triton.cdiv(num_cols, tile["BLOCK_N"]),)
    gemv_kernel[grid](
        x, w, out if bias is None else bias, out, num_cols, size,
        **tile, EVEN_K=size % tile["BLOCK_K"] == 0, HAS_BIAS=bias is not None, **pdl.options(),
    )  # fmt: skip
    return out


def linear(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Like `torch.nn.functional.linear` (cuBLAS), which serves what the two kernels do not: this one for one row, and
    `skinny_gemm` up to its MAX_ROWS. With `out_dtype` fp32 (x [R,
    K]) the sums are not rounded to x's type; then w may be fp32, and only with such a w there may be a bias."""
    if supports(x, w):
        return gemv(x, w, out_dtype=out_dtype, bias=bias)
    if skinny_gemm.supports(x, w):
        return skinny_gemm.skinny_gemm(x, w, out_dtype=out_dtype, bias=bias)
    if w.dtype != x.dtype:
        return F.linear(x.to(w.dtype), w, bias)
    if out_dtype is None:
        return F.linear(x, w, bias)
    return torch.mm(x, w.T, out_dtype=out_dtype)
