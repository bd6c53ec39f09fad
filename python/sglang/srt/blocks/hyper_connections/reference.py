"""Hyper-connections in plain torch: the CPU kernel, and the reference for tests."""

from __future__ import annotations

import torch

from sglang.srt.kernels.op import Op
from sglang.srt.layers.native_ops import rmsnorm


def hyper_connection(
    streams: torch.Tensor,
    out: torch.Tensor | None,
    placement: torch.Tensor | None,
    matrix: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    mix_eps: float,
    rounds: int,
    lagged: bool = False,
    magnitude: float = 2.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Connects one block of a model with N streams to the next: adds the previous block's output to the streams, and
    computes the next block's input.

    streams [T, N, H]; out [T, H] of the block before, and placement [T, N + N * N] fp32 that this op made before that
    block (None before the first one): stream k becomes placement[k] * out + sum over j of placement[N + j N + k] *
    stream j. matrix [M, N H], base [M], scale [3 or 1] fp32; weight [H] of the norm; eps of norms, mix_eps of the
    normalization -> the streams; normed inputs of the next block [T, H]; its placement. M is N (2 + N), or N behind the
    last layer, where the placement is empty.

    With M of 2 N the streams do not mix: a placement is [T, N], and stream k becomes placement[k] * out + stream k.

    The product of the matrix and the streams of a token, divided by their root mean square, gives weights of the
    streams in the input (a sigmoid), weights of the output in the streams (`magnitude` times a sigmoid; plus mix_eps
    where streams do not mix), and a matrix that is
    `rounds` times normalized so that its columns and rows sum to 1 (Sinkhorn). Source: DeepSeek-V4's report, section
    2.2.

    With `lagged` the weights of the streams in the input are those that the call before this one made, and a placement
    is [T, N + N * N + N]: this call's lie behind it. Without a placement the input is the first stream.
    """
    num, wide = streams.shape[1], _wide(streams)
    if out is not None:
        assert placement is not None
        streams = placed(streams, out, placement)
    values = streams.to(wide)
    flat = values.flatten(1)
    logits = (flat @ matrix.to(wide).T) * torch.rsqrt(flat.square().mean(1, keepdim=True) + eps)
    pieces = (num, num, num * num)[: {num: 1, 2 * num: 2}.get(len(matrix), 3)]
    parts = [
        part * factor + bias
        for part, factor, bias in zip(logits.split(pieces, 1), scale.to(wide), base.to(wide).split(pieces), strict=True)
    ]
    from_streams = weights = parts[0].sigmoid() + mix_eps
    if lagged:
        from_streams = weights_behind(placement, streams).to(wide)
    x = (from_streams[..., None] * values).sum(1).to(streams.dtype)
    if len(parts) == 1:
        return streams, rmsnorm(x, weight, eps), streams.new_empty((len(streams), 0), dtype=torch.float32)
    to_streams = magnitude * parts[1].sigmoid()
    if len(parts) == 2:
        following = to_streams + mix_eps
        return streams, rmsnorm(x, weight, eps), following.float() if wide is torch.float32 else following
    mix = doubly_stochastic(parts[2].unflatten(1, (num, num)), mix_eps, rounds)
    following = torch.cat((to_streams, mix.flatten(1), *([weights] if lagged else [])), dim=1)
    return streams, rmsnorm(x, weight, eps), following.float() if wide is torch.float32 else following


def weights_behind(placement: torch.Tensor | None, streams: torch.Tensor) -> torch.Tensor:
    """Returns the weights [T, N] of the streams [T, N, H] in the next block's input, stored at the end of a lagged
    placement; without a placement only the first stream counts."""
    num = streams.shape[1]
    if placement is not None:
        return placement[:, num + num * num :]
    first = torch.zeros((len(streams), num), dtype=torch.float32, device=streams.device)
    first[:, 0] = 1.0
    return first


def placed(streams: torch.Tensor, out: torch.Tensor, placement: torch.Tensor) -> torch.Tensor:
    """Returns the streams [T, N, H] after adding the previous block's output: the first step of `hyper_connection`."""
    num, wide = streams.shape[1], _wide(streams)
    if placement.shape[1] == num:
        return (placement.to(wide)[..., None] * out[:, None].to(wide) + streams.to(wide)).to(streams.dtype)
    to_streams, mix = placement[:, : num + num * num].to(wide).split((num, num * num), dim=1)
    values = torch.einsum("tjk,tjh->tkh", mix.unflatten(1, (num, num)), streams.to(wide))
    return (to_streams[..., None] * out[:, None].to(wide) + values).to(streams.dtype)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def doubly_stochastic(logits: torch.Tensor, eps: float, rounds: int) -> torch.Tensor:
    """Returns the row-wise softmax of logits [..., N, N] after Sinkhorn normalization: columns and rows are divided by
    their sums in alternation, columns `rounds` times."""
    mix = logits.softmax(-1) + eps
    mix = mix / (mix.sum(-2, keepdim=True) + eps)
    for _ in range(rounds - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + eps)
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
    return mix


HYPER_CONNECTION = Op("hyper_connection", hyper_connection)
