"""RMSNorm with its weight and the planned kernels."""

from __future__ import annotations

import torch

from sglang.srt.distributed.partial_sums import Summands
from sglang.srt.layers.ops import AddRMSNormOp, RMSNormOp
from sglang.srt.layers.parameter import Init, Scope, TensorPart
from sglang.srt.layers.quantization.activations import Activations, RowFormat
from sglang.srt.plan.weight_names import PartKey


def norm_weight(scope: Scope, size: int, zero_centred: bool) -> torch.Tensor:
    """Returns the weight [size] that a norm multiplies by. Where checkpoints store it minus 1 it is kept in fp32: small
    numbers have more digits than those near 1."""
    if not zero_centred:
        return scope.param("weight", (size,), init=Init.ONES)
    part = TensorPart((size,), convert=lambda stored: stored.float() + 1.0)
    return scope.param("weight", (size,), {PartKey(): part}, Init.ONES, torch.float32)


class RMSNorm:
    """Norm over the hidden size; `residual` is the sum of everything before, carried beside the hidden states."""

    def __init__(self, scope: Scope, size: int, eps: float, zero_centred: bool = False) -> None:
        self.weight = norm_weight(scope, size, zero_centred)
        self.eps = eps
        self._norm: RMSNormOp = scope.plan.entry("rmsnorm")
        self._add_norm: AddRMSNormOp = scope.plan.entry("fused_add_rmsnorm")

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual [T, H] -> (norm of their sum, their sum). Without a residual `x` is the sum."""
        if residual is None:
            return self._norm(x, self.weight, self.eps), x
        normed, total = self._add_norm(x, residual, self.weight, self.eps)
        return normed, total

    def add_partial_sums(
        self, x: torch.Tensor, residual: torch.Tensor | None, group: Summands
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes the norm, as a call does, of the sum of `x` over the group's ranks: in one kernel where the group
        has one for it."""
        at_once = group.all_reduce_add_rms_norm(x, residual, self.weight, self.eps)
        return self(group.all_reduce(x), residual) if at_once is None else at_once

    def quantized(
        self, x: torch.Tensor, residual: torch.Tensor | None, wanted: RowFormat | None, group: Summands | None
    ) -> tuple[Activations, torch.Tensor]:
        """Computes the norm as a call does, or with a group as `add_partial_sums` does; where rows are many it also
        quantizes them in the norm's launch. For sums over ranks that is as many launches as a sum with its norm, and
        one that quantizes."""
        if wanted is None or residual is None or len(x) < wanted.least:
            return self(x, residual) if group is None else self.add_partial_sums(x, residual, group)
        from sglang.srt.layers.triton_ops.norm_quantize import add_rmsnorm_quantize

        x = x if group is None else group.all_reduce(x)
        return add_rmsnorm_quantize(x, residual, self.weight, self.eps, wanted.form)
