"""Kernels of n-gram embeddings in plain torch: the CPU kernels, and the reference for tests.

Math is done in fp32, or in fp64 for fp64 streams.
"""

from __future__ import annotations

import math

import torch

from sglang.srt.blocks.ngram_embedding.ngram_kernels import NgramHash, NgramKernels
from sglang.srt.kernels.op import Op
from sglang.srt.layers.compressed_step import TokenRequests
from sglang.srt.layers.last_rows import keep_last, token_before, wide


def ngram_places(ids: torch.Tensor, kept: torch.Tensor, requests: TokenRequests, hashed: NgramHash) -> torch.Tensor:
    """Returns the rows [T, heads] int64 of `ngram_rows` within each head's part of the table."""
    fill = ids.new_full((), hashed.filling)
    last = torch.where(ids == hashed.end_token, fill, ids)
    mixed, mixes, ended = last * hashed.multipliers[0], [], torch.zeros_like(ids, dtype=torch.bool)
    for place in range(1, len(hashed.multipliers)):
        earlier = token_before(ids, kept, requests, place, fill)
        ended = ended | (earlier == hashed.end_token)
        mixed = mixed ^ (torch.where(ended, fill, earlier) * hashed.multipliers[place])
        mixes.append(mixed)
    heads = torch.arange(len(hashed.sizes), device=ids.device) + hashed.first_head
    return torch.stack(mixes, dim=1)[:, heads // hashed.per_ngram] % hashed.sizes


def ngram_rows(
    ids: torch.Tensor,
    kept: torch.Tensor,
    requests: TokenRequests,
    hashed: NgramHash,
    table: torch.Tensor,
    scale: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Looks up the rows of the n-grams that end with each token.

    ids [T] int64; kept [requests, longest - 1] int32: ids of the last tokens before the step of each request, of
    position p at p % (longest - 1); table [rows, D], in e4m3 with scale [1] fp32, or [rows, D / G] of bytes: a power of
    two for every G columns, as e8m0 -> out [T, heads * D].

    The hash of an n-gram is the exclusive or of its token ids, each times its multiplier; modulo a head's size it is
    the row. `hashed.filling` replaces end tokens, all tokens before an end token, and those before the request's first.
    """
    places = ngram_places(ids, kept, requests, hashed) + hashed.offsets
    rows = table[places.to(table.device)].to(ids.device)
    values = rows.float() if scale is not None else rows
    if scale is not None and scale.ndim == 1:
        values = values * scale
    elif scale is not None:
        exponents = scale[places.to(scale.device)].to(ids.device).int() - 127
        values = torch.ldexp(values.unflatten(-1, (exponents.shape[-1], -1)), exponents[..., None]).flatten(2)
    out.copy_(values.flatten(1))


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    values = wide(x)
    return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps) * wide(weight)


def gate_values(
    products: torch.Tensor,
    streams: torch.Tensor,
    key_weight: torch.Tensor,
    query_weight: torch.Tensor,
    conv_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the value gated by each stream, and its norm, each [T, N, H]. products [T, (N + 1) * H]: a key per stream
    and one value; streams [T, N, H]; norm weights [N, H] fp32.

    The gate is the sigmoid of the signed root of the product of key and stream, both normalized, divided by sqrt(H).
    """
    num, size = streams.shape[1:]
    keys, value = products.split((num * size, size), dim=1)
    keys = _normed(keys.unflatten(1, (num, size)), key_weight, eps).to(streams.dtype)
    queries = _normed(streams, query_weight, eps).to(streams.dtype)
    gate = (wide(keys) * wide(queries)).sum(-1, keepdim=True) / math.sqrt(size)
    gate = gate.abs().clamp(min=1e-6).sqrt() * gate.sign()
    values = (gate.sigmoid() * wide(value)[:, None]).to(streams.dtype)
    return values, _normed(values, conv_weight, eps).to(streams.dtype)


def convolve_values(
    values: torch.Tensor,
    normed: torch.Tensor,
    weight: torch.Tensor,
    dilation: int,
    kept: torch.Tensor,
    requests: TokenRequests,
) -> None:
    """Adds to values [T, N, H] in place silu of the causal depthwise convolution of normed [T, N, H] by weight [N * H,
    taps], with taps `dilation` tokens apart. kept [requests, R, N * H], R = (taps - 1) * dilation: convolution inputs
    of each request's last R tokens, position p at p % R."""
    taps = weight.shape[1]
    rows = normed.flatten(1)
    total = wide(rows) * wide(weight)[:, -1]
    zero = rows.new_zeros(())
    for tap in range(1, taps):
        earlier = token_before(rows, kept, requests, tap * dilation, zero)
        total = total + wide(earlier) * wide(weight)[:, taps - 1 - tap]
    values += torch.nn.functional.silu(total).to(values.dtype).view(values.shape)


NGRAM_EMBEDDING = NgramKernels(ngram_rows, gate_values, convolve_values, keep_last)

NGRAM_EMBEDDING_OP = Op("ngram_embedding", NGRAM_EMBEDDING)
