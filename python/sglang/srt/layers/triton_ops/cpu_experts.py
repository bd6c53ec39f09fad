"""Kernels of experts that CPUs compute: the request that a step writes to main memory, and the sum with the results.

The parts of a request are page-locked main memory, which kernels write and read under its address on the device.
Reference: `layers/moe/cpu_experts/ops`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sglang.srt.layers.moe.cpu_experts import ops

if TYPE_CHECKING:
    from sglang.srt.layers.moe.cpu_experts.ops import Request

BLOCK = 1024
PAIRS = tl.constexpr(ops.MAX_PAIRS)
DONE, TOKENS, TOP_K = tl.constexpr(ops.DONE), tl.constexpr(ops.TOKENS), tl.constexpr(ops.TOP_K)
FETCHED = tl.constexpr(ops.FETCHED)
WHOLE, TURN, STRIDE = tl.constexpr(ops.WHOLE), tl.constexpr(ops.TURN), tl.constexpr(ops.STRIDE)


@triton.jit(
    do_not_specialize=["num_tokens", "top_k", "num_experts", "hidden", "x_stride"], do_not_specialize_on_alignment=["x"]
)
def divide_misses_kernel(
    ids,
    weights,
    x,
    slot_of_expert,
    clock,
    out_ids,
    asked,
    addresses,  # [5] int64: of the request's ids, weights, x, results and words
    num_tokens,
    top_k,
    num_experts,
    hidden,
    x_stride,
    BLOCK: tl.constexpr,
):
    """A program copies the row of one token; each finds out by itself which pairs are the CPUs'."""
    token = tl.program_id(0)
    words = tl.load(addresses + 4).to(tl.pointer_type(tl.int32))
    step = tl.load(clock)
    pair = tl.arange(0, PAIRS)
    inside = pair < num_tokens * top_k
    expert = tl.load(ids + pair, mask=inside, other=-1)
    slot = tl.load(slot_of_expert + tl.maximum(expert, 0), mask=inside & (expert >= 0), other=0)
    missing = inside & (expert >= 0) & (slot < 0)
    # The first pair of each missing expert stands for it.
    same = (expert[:, None] == expert[None, :]) & (pair[:, None] < pair[None, :])
    first = missing & (tl.sum(same.to(tl.int32), axis=0) == 0)
    key = ((expert + step % num_experts * STRIDE) % num_experts).to(tl.int32)
    ahead = first[:, None] & (key[:, None] < key[None, :])
    rank = tl.sum(ahead.to(tl.int32), axis=0)
    count = tl.sum(first.to(tl.int32))
    copied = ((count * tl.load(words + FETCHED) + step % WHOLE * TURN % WHOLE) // WHOLE).to(tl.int32)
    mine = missing & (rank >= copied)
    if token == 0:
        some = tl.sum(mine.to(tl.int32)) > 0
        weight = tl.load(weights + pair, mask=inside, other=0.0)
        tl.store(out_ids + pair, tl.where(mine, -1, expert), mask=inside)
        asked_ids = tl.load(addresses).to(tl.pointer_type(tl.int32))
        asked_weights = tl.load(addresses + 1).to(tl.pointer_type(tl.float32))
        tl.store(asked_ids + pair, tl.where(mine, expert, -1), mask=inside)
        tl.store(asked_weights + pair, weight, mask=inside)
        tl.store(words + DONE, 0)
        tl.store(words + DONE + 1, 0)
        tl.store(words + TOKENS, tl.where(some, num_tokens, 0))
        tl.store(words + TOP_K, top_k)
        tl.store(asked, some.to(tl.int32))
    if tl.sum((mine & (pair // top_k == token)).to(tl.int32)) > 0:
        to = tl.load(addresses + 2).to(tl.pointer_type(tl.bfloat16)) + token.to(tl.int64) * hidden
        for start in range(0, hidden, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(to + at, tl.load(x + token.to(tl.int64) * x_stride + at, mask=at < hidden), mask=at < hidden)


@triton.jit(do_not_specialize=["hidden", "out_stride"], do_not_specialize_on_alignment=["out"])
def add_results_kernel(out, addresses, asked, hidden, out_stride, BLOCK: tl.constexpr):
    """One program a token and block of columns."""
    if tl.load(asked) == 0:
        return
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    results = tl.load(addresses + 3).to(tl.pointer_type(tl.float32)) + token * hidden
    result = tl.load(results + at, mask=at < hidden, other=0.0)
    place = out + token * out_stride + at
    total = tl.load(place, mask=at < hidden, other=0.0).to(tl.float32) + result
    tl.store(place, total.to(out.dtype.element_ty), mask=at < hidden)


def divide_misses(
    ids: torch.Tensor,
    weights: torch.Tensor,
    x: torch.Tensor,
    slot_of_expert: torch.Tensor,
    clock: torch.Tensor,
    request: Request,
) -> torch.Tensor:
    """Does as the reference. ids and weights contiguous, rows of x contiguous."""
    out = torch.empty_like(ids)
    tokens, top_k = ids.shape
    divide_misses_kernel[(tokens,)](
        ids, weights, x, slot_of_expert, clock, out, request.asked, request.addresses,
        tokens, top_k, len(slot_of_expert), x.shape[1], x.stride(0), BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return out


def add_results(out: torch.Tensor, request: Request) -> None:
    """Does as the reference. Rows of out contiguous."""
    add_results_kernel[(len(out), triton.cdiv(out.shape[1], BLOCK))](
        out, request.addresses, request.asked, out.shape[1], out.stride(0), BLOCK=BLOCK, num_warps=4
    )


CPU_EXPERTS = ops.CpuExpertKernels(divide_misses, add_results)
