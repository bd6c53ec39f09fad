"""Quantization of an indexer's keys and queries: Hadamard rotation and e4m3.

The rotation spreads outliers over all 128 columns; since queries and keys are rotated alike, products do not change.
References:
`native_sparse_ops.index_key_store` and `index_queries`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops import pdl

DIM = 128
LAUNCH = {"BLOCK": 32, "num_warps": 4}
"""Rows of a program; 16 at least for the matrix unit."""


@triton.jit
def _turned_e4m3(x, DIM: tl.constexpr):
    """x [R, DIM] of 16 bits -> (e4m3 [R, DIM], scales [R] fp32)."""
    at = tl.arange(0, DIM)
    # Entry (i, j) of Sylvester's matrix is -1 where i & j has an odd number of ones.
    ones = at[:, None] & at[None, :]
    ones ^= ones >> 4
    ones ^= ones >> 2
    ones ^= ones >> 1
    signs = (1 - 2 * (ones & 1)).to(x.dtype)
    turned = tl.dot(x, signs) * 0.08838834764831845  # 1 / sqrt(128)
    scales = tl.maximum(tl.max(tl.abs(turned), 1), 1e-4) / 448.0
    numbers = tl.minimum(tl.maximum(turned / scales[:, None], -448.0), 448.0)
    return numbers.to(tl.float8e4nv), scales


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["out_cache_loc_ptr"])
def index_key_store_kernel(
    keys_ptr, cache_ptr, scales_ptr, out_cache_loc_ptr, num_rows, key_stride, slot_stride, scale_stride,
    DIM: tl.constexpr, QUANTIZED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """keys [T, DIM] -> cache [S, DIM] and, if QUANTIZED, scales [S]. Grid: (cdiv(T, BLOCK),)."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    col = tl.arange(0, DIM)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(out_cache_loc_ptr + row, mask=row < num_rows, other=-1).to(tl.int64)
    ok = slot >= 0
    keys = tl.load(keys_ptr + row.to(tl.int64)[:, None] * key_stride + col, mask=ok[:, None], other=0.0)
    entries = cache_ptr + slot[:, None] * slot_stride + col
    if QUANTIZED:
        numbers, scales = _turned_e4m3(keys, DIM)
        tl.store(entries, numbers, mask=ok[:, None])
        tl.store(scales_ptr + slot * scale_stride, scales, mask=ok)
    else:
        tl.store(entries, keys.to(cache_ptr.dtype.element_ty), mask=ok[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def index_queries_kernel(
    q_ptr, weights_ptr, out_ptr, out_weights_ptr, num_rows, scale, q_stride, head_stride, weight_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows (token, head) of q [T, HEADS, DIM] and weights [T, HEADS] -> out [T, HEADS, DIM] e4m3 and out_weights
    [T, HEADS] fp32. num_rows: T * HEADS. Grid: (cdiv(T * HEADS, BLOCK),)."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = row < num_rows
    token = (row // HEADS).to(tl.int64)
    head = row % HEADS
    col = tl.arange(0, DIM)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    q_rows = token * q_stride + head * head_stride
    q = tl.load(q_ptr + q_rows[:, None] + col, mask=ok[:, None], other=0.0)
    numbers, scales = _turned_e4m3(q, DIM)
    weights = tl.load(weights_ptr + token * weight_stride + head, mask=ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + row.to(tl.int64)[:, None] * DIM + col, numbers, mask=ok[:, None])
    tl.store(out_weights_ptr + row, weights * scale * scales, mask=ok)


def index_key_store(
    keys: torch.Tensor, cache: torch.Tensor, scales: torch.Tensor | None, out_cache_loc: torch.Tensor
) -> None:
    """Stores keys [T, 128] of 16 bits (row stride free) in cache [S, 1, 128] at out_cache_loc [T], skipping negative
    places. With scales [S, 1] fp32 the cache is e4m3 and keys are rotated; otherwise they are cast to the cache's
    dtype."""
    if (scales is not None) != (cache.dtype == torch.float8_e4m3fn):
        raise TypeError(f"an index cache in {cache.dtype}, with scales: {scales is not None}; only e4m3 has scales")
    num_rows, dim = keys.shape
    if num_rows:
        index_key_store_kernel[(triton.cdiv(num_rows, LAUNCH["BLOCK"]),)](
            keys, cache, keys if scales is None else scales, out_cache_loc, num_rows, keys.stride(0), cache.stride(0),
            1 if scales is None else scales.stride(0), DIM=dim, QUANTIZED=scales is not None, **LAUNCH, **pdl.options(),
        )  # fmt: skip


def index_queries(
    q: torch.Tensor, weights: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns queries [T, H, 128] of `dtype`, rotated for e4m3 or unchanged in 16 bits, and weights [T, H] fp32 that
    include `scale` and the queries' scales, from q [T, H, 128] of 16 bits and head weights [T, H] (row strides
    free)."""
    if dtype != torch.float8_e4m3fn:
        return q.to(dtype).contiguous(), weights.float() * scale
    num_tokens, heads, dim = q.shape
    out = torch.empty((num_tokens, heads, dim), dtype=dtype, device=q.device)
    out_weights = torch.empty((num_tokens, heads), dtype=torch.float32, device=q.device)
    if num_tokens:
        index_queries_kernel[(triton.cdiv(num_tokens * heads, LAUNCH["BLOCK"]),)](
            q, weights, out, out_weights, num_tokens * heads, scale, q.stride(0), q.stride(1), weights.stride(0),
            HEADS=heads, DIM=dim, **LAUNCH, **pdl.options(),
        )  # fmt: skip
    return out, out_weights
