"""Weighted residual sums in plain torch: the CPU kernels, and the reference for tests. Math is done in fp32, or in fp64
for fp64 streams."""

from __future__ import annotations

import torch

from sglang.srt.kernels.op import Op

LEAST_VARIANCE = 1e-3
"""Of the stream: the least square of its factor."""


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _norm(values: torch.Tensor, eps: float) -> torch.Tensor:
    return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)


def add_gated(
    stream: torch.Tensor, out: torch.Tensor, scale: torch.Tensor | None, gate: torch.Tensor, eps_after: float
) -> None:
    """Changes the stream [T, H] in place to a * stream + b * norm(scale * out), channel by channel: b is sigmoid(gate
    [H] fp32), a is sqrt(max((1 - b) * (1 + b), LEAST_VARIANCE)). `scale` [H] fp32; None: 1."""
    values = _wide(out) if scale is None else _wide((_wide(out) * _wide(scale)).to(out.dtype))
    normed = _wide(_norm(values, eps_after).to(out.dtype))
    b = _wide(gate).sigmoid()
    a = (_wide(-gate).sigmoid() * (1 + b)).clamp(min=LEAST_VARIANCE).sqrt()
    stream.copy_(a * _wide(stream) + b * normed)


def gated_sum(
    stream: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor | None,
    gate: torch.Tensor,
    eps_after: float,
    weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Adds a block's output to the stream in place, as `add_gated` does, and returns the norm of the sum, times weight
    [H], [T, H]."""
    add_gated(stream, out, scale, gate, eps_after)
    return (_norm(_wide(stream), eps) * _wide(weight)).to(stream.dtype)


GATED_SUM = Op("gated_sum", gated_sum)
