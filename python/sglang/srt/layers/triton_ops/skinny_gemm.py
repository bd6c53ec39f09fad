"""y = x @ w^T for few rows of x: the time is that of reading w once. Reference: `torch.nn.functional.linear`.

One row: threads along K multiply and add, no matrix instructions. More rows: w is the left operand of the matrix
instruction, so that its 64 or more rows fill it and x^T needs only 16 columns. K is split over programs until they fill
the GPU; the last program of a column block adds the parts in a fixed order, so results do not vary from run to run.

GATED: w holds gate rows, then up rows; y = silu(x @ gate^T) * (x @ up^T).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops import pdl
from sglang.srt.layers.triton_ops.activation import silu_and_mul

MAX_ROWS = 16
MIN_COLUMN_BLOCK = 32
Tile = dict[str, int]


@triton.jit
def _finish(value, DTYPE: tl.constexpr):
    return value.to(DTYPE).to(tl.float32)


@triton.jit
def _silu_gate(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def gemv_kernel(
    x,  # [K]
    w,  # [N, K], or [2N, K] if GATED
    out,  # [N]
    N,
    K,
    GATED: tl.constexpr,
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
    if GATED:
        up_at = w_at + tl.cast(N, tl.int64) * K
        up_total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    weight = tl.load(w_at, eviction_policy="evict_first")
    if GATED:
        up_weight = tl.load(up_at, eviction_policy="evict_first")
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for start in range(0, K, BLOCK_K):
        # The next block of weights is on its way while this one is multiplied.
        more = (start + BLOCK_K + k < K)[None, :]
        next_weight = tl.load(w_at + start + BLOCK_K, mask=more, other=0.0, eviction_policy="evict_first")
        if GATED:
            next_up = tl.load(up_at + start + BLOCK_K, mask=more, other=0.0, eviction_policy="evict_first")
        a = tl.load(x + start + k).to(tl.float32)[None, :]
        total += weight.to(tl.float32) * a
        weight = next_weight
        if GATED:
            up_total += up_weight.to(tl.float32) * a
            up_weight = next_up
    dtype = out.dtype.element_ty
    y = tl.sum(total, axis=1)
    if GATED:
        y = _silu_gate(_finish(y, dtype), _finish(tl.sum(up_total, axis=1), dtype))
    tl.store(out + cols, y.to(dtype), mask=cols < N)


@triton.jit(do_not_specialize=["M"])
def skinny_kernel(
    x,  # [M, K]
    w,  # [N, K]
    out,  # [M, N]
    partial,  # [SPLIT_K, M, N] fp32 scratch
    arrivals,  # [column blocks] int32, zero before and after
    M,
    N,
    K,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """M <= BLOCK_M rows of x. BLOCK_K divides K."""
    block, split = tl.program_id(0), tl.program_id(1)
    cols = block * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.where(cols < N, cols, 0).to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    steps = tl.cdiv(K // BLOCK_K, SPLIT_K)
    first = split * steps * BLOCK_K
    last = tl.minimum(first + steps * BLOCK_K, K)
    k = tl.arange(0, BLOCK_K)
    w_at = w + rows[:, None] * K + k[None, :]
    x_at = x + m[None, :] * x_stride + k[:, None]
    x_there = (m < M)[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for start in range(first, last, BLOCK_K):
        weight = tl.load(w_at + start, eviction_policy="evict_first")
        a = tl.load(x_at + start, mask=x_there, other=0.0)
        total = tl.dot(weight, a, total)

    there = (cols < N)[:, None] & x_there
    at = m[None, :] * N + cols[:, None]
    if SPLIT_K == 1:
        tl.store(out + at, total.to(out.dtype.element_ty), mask=there)
    else:
        tl.store(partial + split * M * N + at, total, mask=there)
        # All threads' parts must be written before the program counts as arrived.
        tl.debug_barrier()
        if tl.atomic_add(arrivals + block, 1, sem="acq_rel") == SPLIT_K - 1:
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for part in range(SPLIT_K):
                total += tl.load(partial + part * M * N + at, mask=there, other=0.0, cache_modifier=".cg")
            tl.store(out + at, total.to(out.dtype.element_ty), mask=there)
            tl.store(arrivals + block, 0)


@dataclass(frozen=True, slots=True)
class SkinnyTiles:
    """`gemv` serves one row; `skinny` 2 to MAX_ROWS rows, with `programs` the number to split K for."""

    gemv: Tile
    gemv_gated: Tile
    skinny: Tile
    programs: int


DEFAULT_TILES = SkinnyTiles(
    gemv={"BLOCK_N": 8, "BLOCK_K": 512, "num_warps": 4},
    gemv_gated={"BLOCK_N": 4, "BLOCK_K": 512, "num_warps": 4},
    skinny={"BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4},
    programs=396,
)
"""Shared memory: 4 stages of 64 x 128 (w) and 16 x 128 (x) bf16 = 81,920 bytes."""

_scratch: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}


def _split_scratch(parts: int, blocks: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(partial sums, arrival counters), shared by all launches on a device: they are ordered on one stream.

    Graphs keep their addresses, so the buffers never shrink and grow only before capture (warm up the largest shape).
    """
    held = _scratch.get(device)
    if held is None or held[0].numel() < parts or held[1].numel() < blocks:
        held = (
            torch.empty(max(parts, 1 << 23), dtype=torch.float32, device=device),
            torch.zeros(max(blocks, 1 << 13), dtype=torch.int32, device=device),
        )
        _scratch[device] = held
    return held


def supports(x: torch.Tensor, w: torch.Tensor, tiles: SkinnyTiles = DEFAULT_TILES) -> bool:
    """Whether these kernels serve the product: few rows, 2-byte floats, K a multiple of every BLOCK_K."""
    rows, size = x.numel() // x.shape[-1], x.shape[-1]
    block_k = tiles.gemv["BLOCK_K"] if rows == 1 else tiles.skinny["BLOCK_K"]
    return 0 < rows <= MAX_ROWS and size % block_k == 0 and x.element_size() == 2 and w.is_contiguous()


def split_k(num_cols: int, size: int, tile: Tile, programs: int) -> int:
    """Parts of K: enough programs to fill the GPU, and at least two steps of BLOCK_K for each."""
    blocks = triton.cdiv(num_cols, tile["BLOCK_N"])
    steps = size // tile["BLOCK_K"]
    parts = max(1, min(round(programs / blocks), steps // 2))
    return triton.cdiv(steps, triton.cdiv(steps, parts))


def skinny_linear(x: torch.Tensor, w: torch.Tensor, tiles: SkinnyTiles = DEFAULT_TILES) -> torch.Tensor:
    """x [..., K] with at most MAX_ROWS rows, w [N, K] contiguous -> [..., N]."""
    rows = x.reshape(-1, x.shape[-1])
    (num_rows, size), num_cols = rows.shape, w.shape[0]
    out = torch.empty((*x.shape[:-1], num_cols), dtype=x.dtype, device=x.device)
    if num_rows == 1:
        grid = (triton.cdiv(num_cols, tiles.gemv["BLOCK_N"]),)
        gemv_kernel[grid](rows, w, out, num_cols, size, GATED=False, **tiles.gemv, **pdl.options())
        return out
    tile = tiles.skinny
    parts = split_k(num_cols, size, tile, tiles.programs)
    blocks = triton.cdiv(num_cols, tile["BLOCK_N"])
    partial, arrivals = _split_scratch(parts * num_rows * num_cols if parts > 1 else 0, blocks, x.device)
    skinny_kernel[(blocks, parts)](
        rows, w, out, partial, arrivals, num_rows, num_cols, size, rows.stride(0),
        BLOCK_M=MAX_ROWS, SPLIT_K=parts, **tile, **pdl.options(),
    )  # fmt: skip
    return out


def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As `torch.nn.functional.linear`, which serves what these kernels do not."""
    if bias is not None or not supports(x, w):
        return F.linear(x, w, bias)
    return skinny_linear(x, w)


def linear_silu_and_mul(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x [..., K], w [2N, K] (gate rows, then up rows) -> silu(x @ gate^T) * (x @ up^T) [..., N]."""
    if x.numel() != x.shape[-1] or not supports(x, w):
        return silu_and_mul(linear(x, w))
    num_cols, size = w.shape[0] // 2, w.shape[1]
    out = torch.empty((*x.shape[:-1], num_cols), dtype=x.dtype, device=x.device)
    tile = DEFAULT_TILES.gemv_gated
    grid = (triton.cdiv(num_cols, tile["BLOCK_N"]),)
    gemv_kernel[grid](x, w, out, num_cols, size, GATED=True, **tile, **pdl.options())
    return out
