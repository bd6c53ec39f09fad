"""Packing and merging of partial attention outputs that ranks exchange (DCP).

A row of a message is a head's part of one token, and behind its columns the logarithm of the sum of its exponentials as
three numbers of the message's type, the first of them nearest to it: added up they have the 24 bits of fp32.

Reference: `native_ops.pack_parts` and `native_ops.merge_parts`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.native_ops import LSE_BYTES
from sglang.srt.layers.triton_ops import pdl


@triton.jit
def pack_parts_kernel(
    parts,  # [T, ranks * H, DIMS]
    lse,  # [T, ranks * H] fp32
    packed,  # [ranks, T, H, DIMS + EXTRA]
    num_tokens,
    num_heads,
    num_ranks,
    DIMS: tl.constexpr,
    EXTRA: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token, head of all)."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0)
    head_of_all = tl.program_id(1)
    target = head_of_all // num_heads
    head = head_of_all % num_heads
    row = token.to(tl.int64) * num_ranks * num_heads + head_of_all
    cols = tl.arange(0, BLOCK)
    behind = tl.arange(0, EXTRA)
    dtype: tl.constexpr = packed.dtype.element_ty
    total = tl.load(lse + row)
    first = total.to(dtype)
    rest = tl.where(first.to(tl.float32) == float("-inf"), 0.0, total - first.to(tl.float32))
    second = rest.to(dtype)
    third = (rest - second.to(tl.float32)).to(dtype)
    logarithm = tl.where(behind == 0, first, tl.where(behind == 1, second, tl.where(behind == 2, third, 0.0)))
    values = tl.load(parts + row * DIMS + cols, mask=cols < DIMS, other=0.0)
    values = tl.where(total == float("-inf"), 0.0, values)
    at = packed + ((target.to(tl.int64) * num_tokens + token) * num_heads + head) * (DIMS + EXTRA)
    tl.store(at + cols, values.to(dtype), mask=cols < DIMS)
    tl.store(at + DIMS + behind, logarithm.to(dtype))


@triton.jit
def _logarithm(row, DIMS: tl.constexpr):
    first = tl.load(row + DIMS).to(tl.float32)
    second = tl.load(row + DIMS + 1).to(tl.float32)
    return first + (second + tl.load(row + DIMS + 2).to(tl.float32))


@triton.jit
def merge_parts_kernel(
    received,  # [ranks, T, H, DIMS + EXTRA]
    sinks,  # [H] fp32
    out,  # [T, H, DIMS]
    num_heads,
    num_ranks,
    out_stride,
    head_stride,
    DIMS: tl.constexpr,
    EXTRA: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token, head)."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0)
    head = tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    row = received + (token.to(tl.int64) * num_heads + head) * (DIMS + EXTRA)
    rank_stride = tl.num_programs(0).to(tl.int64) * num_heads * (DIMS + EXTRA)
    top = float("-inf")
    if HAS_SINKS:
        top = tl.load(sinks + head)
    at = row
    for _ in range(num_ranks):
        top = tl.maximum(top, _logarithm(at, DIMS))
        at += rank_stride
    base = tl.where(top == float("-inf"), 0.0, top)
    weights = 0.0
    if HAS_SINKS:
        weights = tl.exp(tl.load(sinks + head) - base)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    at = row
    for _ in range(num_ranks):
        weight = tl.exp(_logarithm(at, DIMS) - base)
        acc += weight * tl.load(at + cols, mask=cols < DIMS, other=0.0).to(tl.float32)
        weights += weight
        at += rank_stride
    acc = acc / tl.where(weights == 0.0, 1.0, weights)
    to = out + token.to(tl.int64) * out_stride + head * head_stride + cols
    tl.store(to, acc.to(out.dtype.element_ty), mask=cols < DIMS)


def launch_constants(dims: int, dtype: torch.dtype) -> dict[str, int]:
    """Returns block size and warps of both kernels for parts of `dims` columns."""
    block = triton.next_power_of_2(dims)
    return {"DIMS": dims, "EXTRA": LSE_BYTES // dtype.itemsize, "BLOCK": block, "num_warps": 1 if block <= 128 else 2}


def pack_parts(parts: torch.Tensor, lse: torch.Tensor, ranks: int) -> torch.Tensor:
    """Returns a message [ranks, T, H, D + extra] with each rank's heads of parts [T, ranks * H, D] and lse [T, ranks *
    H] fp32, contiguous. Parts with log-sum-exp -inf become zeros."""
    num_tokens, heads_of_all, dims = parts.shape
    launch = launch_constants(dims, parts.dtype)
    heads = heads_of_all // ranks
    packed = parts.new_empty((ranks, num_tokens, heads, dims + launch["EXTRA"]))
    if packed.numel():
        pack_parts_kernel[(num_tokens, heads_of_all)](
            parts, lse, packed, num_tokens, heads, ranks, **launch, **pdl.options()
        )  # fmt: skip
    return packed


def merge_parts(received: torch.Tensor, sinks: torch.Tensor | None, out: torch.Tensor) -> None:
    """Fills out [T, H, D] from messages received [ranks, T, H, D + extra], contiguous; zeros if no rank has a token.
    sinks [H] fp32: one more logit per head, without a value."""
    ranks, num_tokens, heads, _ = received.shape
    if out.numel():
        launch = launch_constants(out.shape[2], received.dtype)
        merge_parts_kernel[(num_tokens, heads)](
            received, out if sinks is None else sinks, out, heads, ranks, out.stride(0), out.stride(1),
            HAS_SINKS=sinks is not None, **launch, **pdl.options(),
        )  # fmt: skip
