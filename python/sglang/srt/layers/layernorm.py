"""RMSNorm with its weight and the planned kernels."""

from __future__ import annotations

import torch

from sglang.srt.layers.parameter import Init, Scope


class RMSNorm:
    """Norm over the hidden size; `residual` is the sum of everything before, carried beside the hidden states."""

    def __init__(self, scope: Scope, size: int, eps: float) -> None:
        self.weight = scope.param("weight", (size,), init=Init.ONES)
        self.eps = eps
        self._norm = scope.plan.entry("rmsnorm")
        self._add_norm = scope.plan.entry("fused_add_rmsnorm")

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual [T, H] -> (norm of their sum, their sum). Without a residual `x` is the sum."""
        if residual is None:
            return self._norm(x, self.weight, self.eps), x
        normed, total = self._add_norm(x, residual, self.weight, self.eps)
        return normed, total
