"""Gated residual streams in plain torch: the CPU kernels, and the reference for tests.

Math is done in fp32, or in fp64 for fp64 streams.
"""

from __future__ import annotations

import torch

from sglang.srt.blocks.gated_streams.stream_kernels import StreamKernels
from sglang.srt.kernels.op import Op


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
    """Adds the previous block's output to the streams [T, N, H] in place, as `place` does (None: there is none), and
    returns each stream normalized by itself, times weight [N, H] fp32."""
    if out is not None:
        assert placement is not None
        place(streams, out, placement)
    values = _wide(streams)
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (normed * _wide(weight)).to(streams.dtype)


def bend(products: torch.Tensor, rank: int, streams: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns silu(first `rank` columns / N) [T, rank], and 2 * sigmoid(other columns / N) [T, N] fp32, of products [T,
    rank + N] of normalized streams; after the last block the latter are missing."""
    low, placed = (_wide(products) / streams).split((rank, products.shape[1] - rank), dim=1)
    return torch.nn.functional.silu(low).to(products.dtype), 2 * placed.sigmoid()


def mix_streams(gates: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
    """Returns the mean over the streams of sigmoid(gates) * normed, [T, H]; gates [T, N * H], normed [T, N, H]."""
    return (_wide(gates).sigmoid().view(normed.shape) * _wide(normed)).mean(1).to(normed.dtype)


GATED_STREAMS = StreamKernels(place_and_norm, bend, mix_streams)

GATED_STREAMS_OP = Op("gated_streams", GATED_STREAMS)
