"""One RMSNorm over all heads of q and one over all of k, in place. Reference: `reference.qk_whole_norm`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops import pdl

LAUNCH = {"BLOCK": 1024, "num_warps": 4}


@triton.jit
def _squares(x, size, BLOCK: tl.constexpr):
    """The sum of the squares of x [size], fp32."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        value = tl.load(x + cols, mask=cols < size, other=0.0).to(tl.float32)
        total += value * value
    return tl.sum(total, 0)


@triton.jit
def whole_sums_kernel(qkv, sums, row_stride, num_q, num_k, k_share, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """qkv [T, Q + K + V] -> sums [T, 2] fp32: of the squares of q, and of k times `k_share`. Grid: (T,)."""
    token = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = qkv + token * row_stride
    tl.store(sums + 2 * token, _squares(row, num_q, BLOCK))
    tl.store(sums + 2 * token + 1, _squares(row + num_q, num_k, BLOCK) * k_share)


@triton.jit
def whole_norm_kernel(
    qkv, sums, q_weight, k_weight, row_stride, num_q, num_k, q_share, k_share, eps, FROM_SUMS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """q and k of qkv [T, Q + K + V] over the root of their mean square: `q_share` and `k_share` times the sums of the
    squares, which are made here, or with FROM_SUMS those of all ranks, sums [T, 2]. Grid: (T, 2): q, k."""
    token = tl.program_id(0).to(tl.int64)
    is_q = tl.program_id(1) == 0
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    size = tl.where(is_q, num_q, num_k)
    row = qkv + token * row_stride + tl.where(is_q, 0, num_q)
    if FROM_SUMS:
        total = tl.load(sums + 2 * token + tl.program_id(1))
    else:
        total = _squares(row, size, BLOCK)
    inverse = tl.rsqrt(total * tl.where(is_q, q_share, k_share) + eps)
    for start in range(0, size, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < size
        value = tl.load(row + cols, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(q_weight + cols, mask=inside & is_q, other=0.0).to(tl.float32)
        weight += tl.load(k_weight + cols, mask=inside & (is_q == 0), other=0.0).to(tl.float32)
        tl.store(row + cols, (value * inverse * weight).to(qkv.dtype.element_ty), mask=inside)


def qk_whole_norm(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    totals: tuple[int, int],
    k_copies: int = 1,
    reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """Normalizes q and k in place. qkv [T, Q + K + V] (rows contiguous); weights [Q] and [K] of this rank. `totals`:
    elements of q and k on all ranks, over which `reduce` sums [T, 2] fp32; `k_copies` ranks hold the same k."""
    num_tokens, sizes = qkv.shape[0], (q_weight.shape[0], k_weight.shape[0])
    if num_tokens == 0:
        return
    sums = qkv
    if reduce is not None:
        rank_sums = torch.empty((num_tokens, 2), dtype=torch.float32, device=qkv.device)
        whole_sums_kernel[(num_tokens,)](
            qkv, rank_sums, qkv.stride(0), *sizes, 1.0 / k_copies, **LAUNCH, **pdl.options()
        )
        sums = reduce(rank_sums)
    whole_norm_kernel[(num_tokens, 2)](
        qkv, sums, q_weight, k_weight, qkv.stride(0), *sizes, 1.0 / totals[0], 1.0 / totals[1], eps,
        FROM_SUMS=reduce is not None, **LAUNCH, **pdl.options(),
    )  # fmt: skip
