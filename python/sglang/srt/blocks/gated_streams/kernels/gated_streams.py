"""Gated residual streams from one block of a model to the next, in three launches around two products. References:
`reference`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.blocks.gated_streams.stream_kernels import StreamKernels
from sglang.srt.layers.triton_ops import pdl
from sglang.srt.layers.triton_ops.norm import row_launch

MIX_LAUNCH = {"BLOCK": 1024, "num_warps": 4}


@triton.jit
def place_and_norm_kernel(
    streams,  # [T, STREAMS, size], in place
    out,  # [T, size]
    placement,  # [T, STREAMS] fp32
    weight,  # [STREAMS, size] fp32
    normed,  # [T, STREAMS, size]
    out_stride,
    size,
    eps,
    HAS_OUT: tl.constexpr,  # False: the streams stay as they are
    STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program: one stream of one token."""
    row = tl.program_id(0).to(tl.int64)
    stream, token = row % STREAMS, row // STREAMS
    cols = tl.arange(0, BLOCK)
    inside = cols < size
    # The weight does not wait for the streams, so its load is issued first.
    scale = tl.load(weight + stream * size + cols, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    values = tl.load(streams + row * size + cols, mask=inside, other=0.0).to(tl.float32)
    if HAS_OUT:
        share = tl.load(placement + row)
        values += share * tl.load(out + token * out_stride + cols, mask=inside, other=0.0).to(tl.float32)
        # The norm sees the stream as the next block will read it.
        placed = values.to(streams.dtype.element_ty)
        tl.store(streams + row * size + cols, placed, mask=inside)
        values = placed.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values) / size + eps)
    tl.store(normed + row * size + cols, (values * inverse * scale).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def bend_kernel(
    products,  # [T, rank + placed]
    low,  # [T, rank]
    placement,  # [T, placed] fp32
    rank,
    placed,
    product_stride,
    STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program: one token."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    values = tl.load(products + token * product_stride + cols, mask=cols < rank + placed, other=0.0).to(tl.float32)
    values /= STREAMS
    gates = tl.sigmoid(values)
    tl.store(low + token * rank + cols, (values * gates).to(low.dtype.element_ty), mask=cols < rank)
    is_placed = (cols >= rank) & (cols < rank + placed)
    tl.store(placement + token * placed + cols - rank, 2 * gates, mask=is_placed)


@triton.jit
def mix_streams_of_gates_kernel(
    gates,  # [T, STREAMS * size]
    normed,  # [T, STREAMS, size]
    out,  # [T, size]
    size,
    gate_stride,
    STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program: some columns of one token."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < size
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros((BLOCK,), tl.float32)
    for stream in tl.static_range(STREAMS):
        at = stream * size + cols
        gate = tl.load(gates + token * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(normed + token * (STREAMS * size) + at, mask=inside, other=0.0).to(tl.float32)
        total += tl.sigmoid(gate) * values
    tl.store(out + token * size + cols, (total / STREAMS).to(out.dtype.element_ty), mask=inside)


def bend_launch(width: int) -> dict[str, int]:
    """Returns the launch for rows of `width` columns."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": max(1, min(8, block // 128))}


def place_and_norm(
    streams: torch.Tensor, out: torch.Tensor | None, placement: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Does as the reference; streams, placement and weight contiguous; the row stride of `out` is free."""
    num_tokens, num, size = streams.shape
    normed = torch.empty_like(streams)
    if num_tokens:
        place_and_norm_kernel[(num_tokens * num,)](
            streams, streams if out is None else out, weight if placement is None else placement, weight, normed,
            size if out is None else out.stride(0), size, eps, HAS_OUT=out is not None, STREAMS=num,
            **row_launch(size), **pdl.options(),
        )  # fmt: skip
    return normed


def bend(products: torch.Tensor, rank: int, streams: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Does as the reference; the row stride of `products` is free."""
    num_tokens, width = products.shape
    low = torch.empty((num_tokens, rank), dtype=products.dtype, device=products.device)
    placement = torch.empty((num_tokens, width - rank), dtype=torch.float32, device=products.device)
    if num_tokens:
        bend_kernel[(num_tokens,)](
            products, low, placement, rank, width - rank, products.stride(0), STREAMS=streams, **bend_launch(width),
            **pdl.options(),
        )  # fmt: skip
    return low, placement


def mix_streams(gates: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
    """Does as the reference; normed contiguous; the row stride of `gates` is free."""
    num_tokens, num, size = normed.shape
    out = torch.empty((num_tokens, size), dtype=normed.dtype, device=normed.device)
    if num_tokens:
        mix_streams_of_gates_kernel[(num_tokens, triton.cdiv(size, MIX_LAUNCH["BLOCK"]))](
            gates, normed, out, size, gates.stride(0), STREAMS=num, **MIX_LAUNCH, **pdl.options()
        )
    return out


GATED_STREAMS = StreamKernels(place_and_norm, bend, mix_streams)
