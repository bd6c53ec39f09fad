"""Weights as a 4-bit checkpoint would have them, for a part of the steps at the end of training.

Gradients are taken where a quantized model stands and applied to the full weights (a straight-through estimate), so
that the model still works after its weights are rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tiny_model.optimizer import is_matrix

GROUP = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of 4-bit floating point."""


def int4(weight: Tensor) -> Tensor:
    """Symmetric, -8..7, a scale for every GROUP inputs."""
    groups = weight.unflatten(-1, (-1, GROUP))
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 7
    return ((groups / scale).round().clamp(-8, 7) * scale).flatten(-2)


def mxfp4(weight: Tensor) -> Tensor:
    """4-bit floating point with a power of two for every GROUP inputs: the coarsest of the formats that are served."""
    groups = weight.unflatten(-1, (-1, GROUP))
    scale = torch.exp2((groups.abs().amax(-1, keepdim=True).clamp_min(1e-12).log2()).floor() - 2)
    magnitudes = torch.tensor(E2M1, device=weight.device, dtype=weight.dtype)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    scaled = groups / scale
    rounded = magnitudes[torch.bucketize(scaled.abs(), middles)] * scaled.sign()
    return (rounded * scale).flatten(-2)


@contextmanager
def rounded_weights(model: nn.Module, step: int) -> Iterator[None]:
    """The two formats take turns. The weights come back, bit for bit, at the end."""
    kept = {name: p.detach().clone() for name, p in model.named_parameters() if is_matrix(name)}
    round_off = int4 if step % 2 else mxfp4
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in kept.items():
            parameters[name].copy_(round_off(weight))
    try:
        yield
    finally:
        with torch.no_grad():
            for name, weight in kept.items():
                parameters[name].copy_(weight)
