"""Rounds the weights of a module with less error than scales that just cover the largest values give.

- `fitted`: each group of columns gets the scale, of some beside that one, with which its errors are smallest.
- `compensated`: columns are rounded one after the other, and those that follow take back the error as far as the
  module's inputs correlate (GPTQ, arXiv 2210.17323).
"""

from __future__ import annotations

import math

import torch

from sglang.srt.configs.quant_scheme import Scheme
from sglang.srt.layers.quantization.reference import (
    E4M3_MAX,
    Quantized,
    decoded_scale,
    dequantize,
    nearest,
    quantize,
    quantize_by,
)

BLOCK = 128
"""Columns after which the errors of a block reach all later ones. A multiple of the columns of any group."""
DAMPING = 0.01
"""Of the mean square of all inputs, added to that of each: inputs that no sample had must not count for nothing."""
INTEGER_STRETCHES = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
MX_STRETCHES = (2.0,)
"""OCP's rule cuts off up to a quarter of the largest value; the next power of two does not."""
NVFP4_STRETCHES = (1.5, 1.25, 0.9, 0.8)
"""With 1.5 the largest value is stored as 4 and not as 6, and those below it are nearer to a code."""


def can_be_fitted(scheme: Scheme) -> bool:
    """Returns whether weights of the scheme have four bits in groups of columns; others lose too little."""
    return scheme.bits == 4 and scheme.group[0] == 1 and scheme.group[1] > 0


def fitted(
    weight: torch.Tensor,
    scheme: Scheme,
    global_scale: torch.Tensor | None = None,
    squares: torch.Tensor | None = None,
) -> Quantized:
    """Quantizes weight [N, K] with the scales that have the smallest sums of squared errors. An error counts as the
    mean square of its column's inputs, `squares` [K] (None: all alike)."""
    best = quantize(weight, scheme, global_scale)
    least = _group_errors(weight, best, scheme, squares)
    plain = scale = best.scale
    for stretch in _stretches(scheme):
        other = quantize_by(weight, scheme, _stretched(plain, stretch, scheme), best.global_scale)
        errors = _group_errors(weight, other, scheme, squares)
        scale = _where(errors < least, other.scale, scale)
        least = torch.minimum(errors, least)
    return quantize_by(weight, scheme, scale, best.global_scale)


def compensated(
    weight: torch.Tensor, scheme: Scheme, products: torch.Tensor, global_scale: torch.Tensor | None = None
) -> Quantized:
    """Quantizes weight [N, K] for inputs x [K] whose mean x x^T is `products` [K, K] fp32, so that the products of
    weights and inputs have small errors."""
    w = weight.float().clone()
    rows, columns = w.shape
    group = scheme.group[1]
    factor = quantize(weight, scheme, global_scale).global_scale
    squares, upper = products.diagonal(), _inverse_factor(products)
    scales: list[torch.Tensor] = []
    for start in range(0, columns, BLOCK):
        end = min(start + BLOCK, columns)
        errors = w.new_empty(rows, end - start)
        for column in range(start, end):
            if column % group == 0:
                of_group = slice(column, column + group)
                scales.append(fitted(w[:, of_group], scheme, factor, squares[of_group]).scale)
                step = decoded_scale(scales[-1], scheme)[:, 0] * (1.0 if factor is None else factor)
            rounded = nearest(torch.where(step > 0, w[:, column] / step, 0.0), scheme.element) * step
            error = (w[:, column] - rounded) / upper[column, column]
            w[:, column + 1 : end] -= error[:, None] * upper[column, column + 1 : end]
            w[:, column] = rounded
            errors[:, column - start] = error
        w[:, end:] -= errors @ upper[start:end, end:]
    return quantize_by(w, scheme, torch.cat(_viewable(scales), dim=-1).view(scales[0].dtype), factor)


def on_device(
    device: str, weight: torch.Tensor, scheme: Scheme, products: torch.Tensor, global_scale: torch.Tensor | None = None
) -> Quantized:
    """Returns what `compensated` does, in main memory, computed on a device."""
    factor = None if global_scale is None else global_scale.to(device)
    rounded = compensated(weight.to(device), scheme, products.to(device), factor)
    factor = rounded.global_scale
    return Quantized(rounded.data.cpu(), rounded.scale.cpu(), None if factor is None else factor.cpu())


def _inverse_factor(products: torch.Tensor) -> torch.Tensor:
    """Returns the upper Cholesky factor of the inverse of the damped products."""
    damped = products.double().clone()
    damped.diagonal().add_(DAMPING * damped.diagonal().mean().clamp_min(1e-12))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True).float()


def _stretches(scheme: Scheme) -> tuple[float, ...]:
    if not can_be_fitted(scheme):
        return ()
    if scheme.scale == "e8m0":
        return MX_STRETCHES
    return NVFP4_STRETCHES if scheme.global_scale else INTEGER_STRETCHES


def _stretched(scale: torch.Tensor, stretch: float, scheme: Scheme) -> torch.Tensor:
    if scheme.scale == "e8m0":
        return (scale.int() + int(math.log2(stretch))).clamp(0, 254).to(torch.uint8)
    wider = scale.float() * stretch
    return (wider.clamp_max(E4M3_MAX) if scheme.global_scale else wider).to(scale.dtype)


def _group_errors(weight: torch.Tensor, q: Quantized, scheme: Scheme, squares: torch.Tensor | None) -> torch.Tensor:
    """Returns the sums of squared errors, in the shape of the scales."""
    errors = (dequantize(q, scheme) - weight.float()).square()
    return (errors if squares is None else errors * squares).unflatten(-1, (-1, scheme.group[1])).sum(-1)


def _viewable(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns tensors of eight bits as bytes: some operations lack types of floating point with eight bits."""
    return [tensor.view(torch.uint8) if tensor.dtype is torch.float8_e4m3fn else tensor for tensor in tensors]


def _where(condition: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    ours, others = _viewable([first, second])
    return torch.where(condition, ours, others).view(first.dtype)
