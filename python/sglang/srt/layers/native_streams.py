"""Gated residual streams in plain torch: the CPU's kernels, and the reference that others are tested against.

Math is done in fp32, and in fp64 where the streams are.
"""

from __future__ import annotations

import torch

from sglang.srt.layers.stream_kernels import StreamKernels


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def place(streams: torch.Tensor, out: torch.Tensor, placement: torch.Tensor) -> None:
    """Adds out [T, H], times placement [T, N] fp32, to each of the streams [T, N, H], in place."""
    total = _wide(streams) + _wide(placement)[..., None] * _wide(out)[:, None]
    streams.copy_(total)


def place_and_norm(
    streams: torch.Tensor,
    out: torch.Tensor | None,
    placement: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Adds to the streams [T, N, H], in place, the output of the block before, as `place` does (None: there is none),
    and norms each stream by itself, times weight [N, H] fp32 -> [T, N, H]."""
    if out is not None:
        assert placement is not None
        place(streams, out, placement)
    values = _wide(streams)
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (normed * _wide(weight)).to(streams.dtype)


def bend(products: torch.Tensor, rank: int, streams: int) -> tuple[torch.Tensor, torch.Tensor]:
    """products [T, rank + N] of normed streams, or [T, rank] behind the last block -> silu of the first `rank` divided
    by N, [T, rank], and twice the sigmoid of the others divided by N, [T, N or 0] fp32."""
    low, placed = (_wide(products) / streams).split((rank, products.shape[1] - rank), dim=1)
    return torch.nn.functional.silu(low).to(products.dtype), 2 * placed.sigmoid()


def mix_streams(gates: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
    """gates [T, N * H], normed [T, N, H] -> the mean over the streams of sigmoid(gates) * normed, [T, H]."""
    return (_wide(gates).sigmoid().view(normed.shape) * _wide(normed)).mean(1).to(normed.dtype)


GATED_STREAMS = StreamKernels(place_and_norm, bend, mix_streams)
