"""y = x @ w^T for few rows of x (a skinny GEMM): the time is that of reading w once. Reference:
`torch.nn.functional.linear`.

The weights are the first operand of the matrix instruction, so that rows of x are padded to 16 and no further. A
program sums its columns over all of K, block after block. What is computed of a row therefore depends on the shape of w
alone, never on how many rows there are or what is in them.

Blocks travel to shared memory in a pipeline, which begins behind the wait for x, for x is copied in it too. Before the
wait the kernel asks for the first AHEAD columns of its weights: into the L2 cache, which takes no registers and no
shared memory, and which no thread waits for.

With four rows on an H100 in bf16, behind a norm (lab/kernels/elementwise/bench_skinny_gemm.py), 4 to 12% faster
than cuBLAS for Qwen3-8B's products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops import pdl
from sglang.srt.layers.triton_ops.scaled_dot import load_rows_there

SkinnyTile = dict[str, int]
MAX_ROWS = 16
"""The rows of x of one matrix instruction: with more, the library's larger tiles serve."""
MIN_COLS, MIN_K, ROW_MULTIPLE = 2048, 512, 16
"""Fewer columns are too few programs; there the library, which may split K, is as fast or faster."""


def _tile(n: int, k: int, ahead: int, warps: int, stages: int) -> SkinnyTile:
    return {"BLOCK_N": n, "BLOCK_K": k, "AHEAD": ahead, "num_warps": warps, "num_stages": stages}


TILE = _tile(64, 128, 512, 4, 5)
LONG_TILE, LONG_K = _tile(32, 128, 2048, 4, 7), 8192
"""The tile of rows of w of so many elements and more."""
WIDE_TILE, WIDE_COLS = _tile(32, 256, 512, 4, 4), 32768
"""The tile of more columns than this. Measured on an H100 with four rows, among 16 tiles with eight ways to begin."""
TILES = (TILE, LONG_TILE, WIDE_TILE)
LINE: tl.constexpr = tl.constexpr(64)
"""Elements of a line of the L2 cache."""


@triton.jit
def prefetch(w, w_rows, K, COLUMNS: tl.constexpr):
    """Ask for the first COLUMNS columns of these rows of w."""
    column = tl.minimum(tl.arange(0, COLUMNS // LINE) * LINE, K - 1)
    at = (w + w_rows[:, None] * K + column[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


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
    AHEAD: tl.constexpr,
    EVEN_K: tl.constexpr,  # BLOCK_K divides K
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N columns of all rows, of which there are BLOCK_M at most."""
    first = tl.program_id(0) * BLOCK_N
    cols = first + tl.arange(0, BLOCK_N)
    # Rows of w past the end repeat the tile's first: their columns are not stored.
    w_rows = tl.where(cols < N, cols, first).to(tl.int64)
    if HAS_BIAS:
        row_bias = tl.load(bias + w_rows)
    if PDL:
        prefetch(w, w_rows, K, AHEAD)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    k = tl.arange(0, BLOCK_K)
    rows = tl.arange(0, BLOCK_M)
    there = rows < T
    w_at = w + w_rows[:, None] * K + k[None, :]
    x_at = x + rows[:, None] * x_stride + k[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            weight = tl.load(w_at + start, eviction_policy="evict_first")
        else:
            weight = tl.load(w_at + start, mask=(k < K - start)[None, :], other=0.0, eviction_policy="evict_first")
        part = load_rows_there(x_at + start, there, K - start, BLOCK_K, EVEN_K)
        total = tl.dot(weight, tl.trans(part), total)
    if HAS_BIAS:
        total += row_bias.to(tl.float32)[:, None]
    at = out + rows[None, :].to(tl.int64) * N + cols[:, None]
    tl.store(at, total.to(out.dtype.element_ty), mask=(cols < N)[:, None] & there[None, :])


def supports(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Returns whether x has 2 to 16 rows of 2-byte floats, and w has the same dtype, enough columns and long enough
    rows. Rows of both must begin at multiples of 16 elements."""
    size = x.shape[-1]
    few = 1 < x.numel() // max(size, 1) <= MAX_ROWS
    same = x.dtype == w.dtype and x.element_size() == 2 and x.stride(0) % ROW_MULTIPLE == 0
    large = len(w) >= MIN_COLS and size >= MIN_K
    return few and same and large and size % ROW_MULTIPLE == 0 and w.is_contiguous()


def tile_for(num_cols: int, size: int) -> SkinnyTile:
    """Returns the tile for w [num_cols, size], for any number of rows of x."""
    if num_cols > WIDE_COLS:
        return WIDE_TILE
    return LONG_TILE if size >= LONG_K else TILE


def skinny_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    tile: SkinnyTile | None = None,
    out_dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns x @ w^T + bias for 1 to 16 rows of x [..., K], w [N, K] contiguous in x's dtype, bias [N], in x's dtype
    or `out_dtype`. `tile` forces one."""
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
