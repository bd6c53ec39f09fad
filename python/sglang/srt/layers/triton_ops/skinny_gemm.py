"""y = x @ w^T for few rows of x (a skinny GEMM): the time is that of reading w once. Reference:
`torch.nn.functional.linear`.

The weights are the first operand of the matrix instruction, so that rows of x are padded to 16 and no further. A
program sums its columns over all of K, block after block. What is computed of a row therefore depends on the shape of w
alone, never on how many rows there are or what is in them.

The kernel asks for its first weights before it waits for x: the first EARLY blocks into registers, and those behind
them, AHEAD columns, into the L2 cache, which takes no registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops import pdl
from sglang.srt.layers.triton_ops.prefetch import prefetch
from sglang.srt.layers.triton_ops.scaled_dot import load_rows, load_rows_there

SkinnyTile = dict[str, int]
MAX_ROWS = 16
"""The rows of x of one matrix instruction: with more, the library's larger tiles serve."""
LEAST_K, ROW_MULTIPLE = 512, 16


def _tile(n: int, k: int, early: int, ahead: int, warps: int, stages: int) -> SkinnyTile:
    return {"BLOCK_N": n, "BLOCK_K": k, "EARLY": early, "AHEAD": ahead, "num_warps": warps, "num_stages": stages}


TILE = _tile(32, 256, 0, 1024, 4, 4)
NARROW_TILE = _tile(16, 256, 0, 1024, 4, 4)
TILES = (TILE, NARROW_TILE)
NARROW_COLS = 8192
"""Up to so many columns programs are narrow, so that all SMs have one."""


@triton.jit(do_not_specialize=["T"])
def skinny_gemm_kernel(
    x,  # [T, K]
    w,  # [N, K]
    bias,  # HAS_BIAS: [N]
    out,  # [T, N]
    T,
    N,
    K,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,  # blocks of weights that are loaded before the kernel waits for x
    AHEAD: tl.constexpr,  # columns behind them that are asked for besides
    EVEN_K: tl.constexpr,  # BLOCK_K divides K
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N columns of all rows."""
    first = tl.program_id(0) * BLOCK_N
    cols = first + tl.arange(0, BLOCK_N)
    # Rows of w past the end repeat the tile's first: their columns are not stored.
    w_rows = tl.where(cols < N, cols, first).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    w_at = w + w_rows[:, None] * K + k[None, :]
    if PDL and AHEAD > 0:
        prefetch(w + EARLY * BLOCK_K, w_rows, K, K - EARLY * BLOCK_K, AHEAD)
    weights = ()  # type: tuple[tl.tensor, ...]
    for step in tl.static_range(EARLY):
        weights = weights + (load_rows(w_at + step * BLOCK_K, K - step * BLOCK_K, BLOCK_K, EVEN_K),)
    if HAS_BIAS:
        row_bias = tl.load(bias + w_rows)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.arange(0, BLOCK_M)
    there = rows < T
    x_at = x + rows[:, None] * x_stride + k[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in tl.static_range(EARLY):
        part = load_rows_there(x_at + step * BLOCK_K, there, K - step * BLOCK_K, BLOCK_K, EVEN_K)
        total = tl.dot(weights[step], tl.trans(part), total)
    for start in range(EARLY * BLOCK_K, K, BLOCK_K):
        if EVEN_K:
            weight = tl.load(w_at + start, eviction_policy="evict_first")
        else:
            weight = tl.load(w_at + start, mask=(k < K - start)[None, :], other=0.0, eviction_policy="evict_first")
        part = load_rows_there(x_at + start, there, K - start, BLOCK_K, EVEN_K)
        total = tl.dot(weight, tl.trans(part), total)
    if HAS_BIAS:
        total += row_bias.to(tl.float32)[:, None]
    at = out + rows[None, :] * N.to(tl.int64) + cols[:, None]
    tl.store(at, total.to(out.dtype.element_ty), mask=(cols < N)[:, None] & there[None, :])


def supports(x: torch.Tensor, w: torch.Tensor) -> bool:
    """2 to 16 rows of 2-byte floats, long enough, and rows of w of the same type begin at multiples of 16 elements."""
    size = x.shape[-1]
    few = 1 < x.numel() // max(size, 1) <= MAX_ROWS
    same = x.dtype == w.dtype and x.element_size() == 2
    return few and same and size >= LEAST_K and size % ROW_MULTIPLE == 0 and w.is_contiguous()


def tile_for(num_cols: int, size: int) -> SkinnyTile:
    """The tile for w [num_cols, size], whatever the number of rows of x."""
    return TILE if num_cols > NARROW_COLS else NARROW_TILE


def skinny_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    tile: SkinnyTile | None = None,
    out_dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [..., K] with 1 to 16 rows, w [N, K] contiguous in x's type, bias [N] -> [..., N] in the dtype of x, or in
    `out_dtype`. `tile` forces one."""
    num_cols, size = w.shape
    flat = x.reshape(-1, size)
    tile = tile or tile_for(num_cols, size)
    out = torch.empty((*x.shape[:-1], num_cols), dtype=out_dtype or x.dtype, device=x.device)
    grid = (triton.cdiv(num_cols, tile["BLOCK_N"]),)
    skinny_gemm_kernel[grid](
        flat, w, out if bias is None else bias, out, len(flat), num_cols, size, flat.stride(0),
        **tile, BLOCK_M=MAX_ROWS, EVEN_K=size % tile["BLOCK_K"] == 0, HAS_BIAS=bias is not None, **pdl.options(),
    )  # fmt: skip
    return out
