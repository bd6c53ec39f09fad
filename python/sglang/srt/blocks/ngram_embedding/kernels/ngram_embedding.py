"""N-gram embeddings of a step's tokens: rows of the table, what goes into the streams, and the states of requests.
References: `reference`.

Each token has programs of its own, which find the tokens before it in the step or in the request's state by positions
on the device: nothing depends on what the host knows, so that graphs may hold all launches. The table may lie in pinned
host memory, which is read over the bus.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from sglang.srt.blocks.ngram_embedding.ngram_kernels import NgramHash, NgramKernels
from sglang.srt.layers.compressed_step import TokenRequests
from sglang.srt.layers.triton_ops import pdl
from sglang.srt.layers.triton_ops.keep_last import keep_last
from sglang.srt.layers.triton_ops.norm import row_launch

BLOCK = 1024
LAUNCH = {"BLOCK": BLOCK, "num_warps": 4}


@triton.jit
def ngram_rows_kernel(
    ids,  # [T] int64
    kept,  # [requests, LONGEST - 1] int32
    slots,  # [T]
    positions,  # [T]
    firsts,  # [T]
    multipliers,  # [LONGEST] int64
    sizes,  # [heads] int64
    offsets,  # [heads] int64
    table,  # [rows, dim]
    scale,  # [1] fp32, or with GROUP [rows, dim / GROUP] bytes of e8m0
    out,  # [T, heads * dim]
    heads,
    first_head,
    per_ngram,
    end_token,
    fill,
    dim,
    LONGEST: tl.constexpr,
    SCALED: tl.constexpr,
    GROUP: tl.constexpr,  # columns that share a scale; 0: all do
    COLS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token, head)."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    longest = 1 + (first_head + head) // per_ngram  # tokens before this one in the head's n-grams
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    position = tl.load(positions + token).to(tl.int64)
    first = tl.load(firsts + token).to(tl.int64)
    state = kept + tl.load(slots + token).to(tl.int64) * (LONGEST - 1)
    last = tl.load(ids + token)
    mixed = tl.where(last == end_token, fill, last) * tl.load(multipliers)
    ended = token < 0
    for place in tl.static_range(1, LONGEST):
        at = position - place
        is_new = at >= first
        new = tl.load(ids + token - place, mask=is_new, other=0)
        past = tl.load(state + at % (LONGEST - 1), mask=(at >= 0) & (at < first), other=0).to(tl.int64)
        earlier = tl.where(at < 0, fill, tl.where(is_new, new, past))
        ended = ended | (earlier == end_token)
        earlier = tl.where(ended, fill, earlier)
        if place <= longest:
            mixed = mixed ^ (earlier * tl.load(multipliers + place))
    row = mixed % tl.load(sizes + head) + tl.load(offsets + head)
    cols = tl.arange(0, COLS)
    values = tl.load(table + row * dim + cols, mask=cols < dim, other=0.0).to(tl.float32)
    if SCALED:
        if GROUP > 0:
            exponents = tl.load(scale + row * (dim // GROUP) + cols // GROUP, mask=cols < dim, other=0)
            values *= (exponents.to(tl.uint32) << 23).to(tl.float32, bitcast=True)
        else:
            values *= tl.load(scale)
    tl.store(out + (token * heads + head) * dim + cols, values.to(out.dtype.element_ty), mask=cols < dim)


@triton.jit
def _norm_factor(values, size, eps):
    return tl.rsqrt(tl.sum(values * values) / size + eps)


@triton.jit
def gate_values_kernel(
    products,  # [T, (STREAMS + 1) * size]
    streams,  # [T, STREAMS, size]
    key_weight,  # [STREAMS, size] fp32
    query_weight,  # [STREAMS, size] fp32
    conv_weight,  # [STREAMS, size] fp32
    values,  # [T, STREAMS, size]
    normed,  # [T, STREAMS, size]
    product_stride,
    size,
    root,
    eps,
    STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program: one stream of one token."""
    row = tl.program_id(0).to(tl.int64)
    stream, token = row % STREAMS, row // STREAMS
    cols = tl.arange(0, BLOCK)
    inside = cols < size
    dtype = values.dtype.element_ty
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    of_token = products + token * product_stride
    key = tl.load(of_token + stream * size + cols, mask=inside, other=0.0).to(tl.float32)
    key *= _norm_factor(key, size, eps)
    key *= tl.load(key_weight + stream * size + cols, mask=inside, other=0.0)
    query = tl.load(streams + row * size + cols, mask=inside, other=0.0).to(tl.float32)
    query *= _norm_factor(query, size, eps)
    query *= tl.load(query_weight + stream * size + cols, mask=inside, other=0.0)
    # Rounded as the reference's norms round them.
    product = tl.sum(key.to(dtype).to(tl.float32) * query.to(dtype).to(tl.float32)) / root
    signed = tl.sqrt(tl.maximum(tl.abs(product), 1e-6))
    signed = tl.where(product > 0, signed, tl.where(product < 0, -signed, 0.0))
    value = tl.load(of_token + STREAMS * size + cols, mask=inside, other=0.0).to(tl.float32)
    gated = (tl.sigmoid(signed) * value).to(dtype)
    tl.store(values + row * size + cols, gated, mask=inside)
    gated = gated.to(tl.float32)
    gated *= _norm_factor(gated, size, eps)
    gated *= tl.load(conv_weight + stream * size + cols, mask=inside, other=0.0)
    tl.store(normed + row * size + cols, gated.to(dtype), mask=inside)


@triton.jit
def convolve_values_kernel(
    values,  # [T, width], in place
    rows,  # [T, width]
    weight,  # [width, TAPS]
    kept,  # [requests, SIZE, width]
    slots,  # [T]
    positions,  # [T]
    firsts,  # [T]
    width,
    TAPS: tl.constexpr,
    DILATION: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token, channels)."""
    SIZE: tl.constexpr = (TAPS - 1) * DILATION
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    position = tl.load(positions + token).to(tl.int64)
    first = tl.load(firsts + token).to(tl.int64)
    state = kept + tl.load(slots + token).to(tl.int64) * SIZE * width
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(TAPS):
        at = position - tap * DILATION
        is_new = (at >= first) & inside
        is_past = (at >= 0) & (at < first) & inside
        row = tl.load(rows + (token - tap * DILATION) * width + cols, mask=is_new, other=0.0).to(tl.float32)
        row += tl.load(state + (at % SIZE) * width + cols, mask=is_past, other=0.0).to(tl.float32)
        total += row * tl.load(weight + cols * TAPS + (TAPS - 1 - tap), mask=inside, other=0.0).to(tl.float32)
    dtype = values.dtype.element_ty
    convolved = (total * tl.sigmoid(total)).to(dtype).to(tl.float32)
    convolved += tl.load(values + token * width + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(values + token * width + cols, convolved.to(dtype), mask=inside)


def ngram_rows(
    ids: torch.Tensor,
    kept: torch.Tensor,
    requests: TokenRequests,
    hashed: NgramHash,
    table: torch.Tensor,
    scale: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Does as the reference. All contiguous; `table` may be in pinned host memory."""
    num_tokens, heads, dim = len(ids), len(hashed.sizes), table.shape[1]
    if num_tokens:
        ngram_rows_kernel[(num_tokens, heads)](
            ids, kept, requests.slots, requests.positions, requests.firsts, hashed.multipliers, hashed.sizes,
            hashed.offsets, table, out if scale is None else scale, out, heads, hashed.first_head, hashed.per_ngram,
            hashed.end_token, hashed.filling, dim, LONGEST=len(hashed.multipliers), SCALED=scale is not None,
            GROUP=0 if scale is None or scale.ndim == 1 else dim // scale.shape[1], **rows_launch(dim), **pdl.options(),
        )  # fmt: skip


def rows_launch(dim: int) -> dict[str, int]:
    """Returns the launch of a kernel that has a program for each row of `dim` columns."""
    return {"COLS": triton.next_power_of_2(dim), "num_warps": 1}


def gate_values(
    products: torch.Tensor,
    streams: torch.Tensor,
    key_weight: torch.Tensor,
    query_weight: torch.Tensor,
    conv_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Does as the reference. Streams and weights contiguous; the row stride of `products` is free."""
    num_tokens, num, size = streams.shape
    values, normed = torch.empty_like(streams), torch.empty_like(streams)
    if num_tokens:
        gate_values_kernel[(num_tokens * num,)](
            products, streams, key_weight, query_weight, conv_weight, values, normed, products.stride(0), size,
            math.sqrt(size), eps, STREAMS=num, **row_launch(size), **pdl.options(),
        )  # fmt: skip
    return values, normed


def convolve_values(
    values: torch.Tensor,
    normed: torch.Tensor,
    weight: torch.Tensor,
    dilation: int,
    kept: torch.Tensor,
    requests: TokenRequests,
) -> None:
    """Does as the reference. All contiguous."""
    num_tokens, width = len(values), weight.shape[0]
    if num_tokens:
        convolve_values_kernel[(num_tokens, triton.cdiv(width, BLOCK))](
            values, normed, weight, kept, requests.slots, requests.positions, requests.firsts, width,
            TAPS=weight.shape[1], DILATION=dilation, **LAUNCH, **pdl.options(),
        )  # fmt: skip


NGRAM_EMBEDDING = NgramKernels(ngram_rows, gate_values, convolve_values, keep_last)
