"""The scales of an fp8 cache, which a checkpoint may give."""

from __future__ import annotations

import torch

from sglang.srt.errors import UserError
from sglang.srt.layers.parameter import Init, Scope, TensorPart
from sglang.srt.plan.weight_names import PartKey


def cache_scale(scope: Scope, leaf: str) -> torch.Tensor:
    """Returns a parameter [1] for a checkpoint's fp8 cache scale, 1 if the checkpoint has none."""
    return scope.param(leaf, (1,), {PartKey(): TensorPart((1,), optional=True)}, Init.ONES, torch.float32)


def cache_scale_value(scale: torch.Tensor | None) -> float:
    """Returns the scale of an fp8 cache, 1 without one. Raises UserError for an invalid scale."""
    value = 1.0 if scale is None else float(scale.item())
    if not 0.0 < value < float("inf"):
        raise UserError(f"the checkpoint's scale of the KV cache is {value}; serve it with --kv-cache-dtype bf16")
    return value
