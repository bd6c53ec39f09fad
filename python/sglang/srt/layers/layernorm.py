"""RMSNorm with its weight and the planned kernels."""

from __future__ import annotations

import torch

from sglang.srt.distributed.partial_sums import DeferredAllReduce
from sglang.srt.layers.ops import FUSED_ADD_RMSNORM, RMSNORM
from sglang.srt.layers.parameter import Init, Scope, TensorPart
from sglang.srt.layers.quantization.activations import Activations, RowFormat
from sglang.srt.plan.weight_names import PartKey


def norm_weight(scope: Scope, size: int, zero_centred: bool) -> torch.Tensor:
    """Returns a norm's weight [size]. If checkpoints store it minus 1 it is kept in fp32, because small numbers have
    more precision than those near 1."""
    if not zero_centred:
        return scope.param("weight", (size,), init=Init.ONES)
    part = TensorPart((size,), convert=lambda stored: stored.float() + 1.0)
    return scope.param("weight", (size,), {PartKey(): part}, Init.ONES, torch.float32)


class RMSNorm:
    """RMS norm over the hidden size, with the residual addition before it."""

    def __init__(self, scope: Scope, size: int, eps: float, zero_centred: bool = False) -> None:
        self.weight = norm_weight(scope, size, zero_centred)
        self.eps = eps
        self._norm = scope.plan.entry(RMSNORM)
        self._add_norm = scope.plan.entry(FUSED_ADD_RMSNORM)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (norm of x + residual, x + residual) for x, residual [T, H]. Without a residual `x` is the sum."""
        if residual is None:
            return self._norm(x, self.weight, self.eps), x
        normed, total = self._add_norm(x, residual, self.weight, self.eps)
        return normed, total

    def add_partial_sums(
        self, x: torch.Tensor, residual: torch.Tensor | None, group: DeferredAllReduce
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Does as a call, with the all-reduce of the partial sums `x` over the group, in one kernel if the group has
        one."""
        at_once = group.all_reduce_add_rms_norm(x, residual, self.weight, self.eps)
        return self(group.all_reduce(x), residual) if at_once is None else at_once

    def quantized(
        self, x: torch.Tensor, residual: torch.Tensor | None, wanted: RowFormat | None, group: DeferredAllReduce | None
    ) -> tuple[Activations, torch.Tensor]:
        """Does as a call, or with a group as `add_partial_sums`; with at least `wanted.least` rows it also quantizes
        them in the norm's kernel. With an all-reduce that takes as many launches as an all-reduce fused with the norm,
        plus one that quantizes."""
        if wanted is None or residual is None or len(x) < wanted.least:
            return self(x, residual) if group is None else self.add_partial_sums(x, residual, group)
        from sglang.srt.layers.triton_ops.norm_quantize import add_rmsnorm_quantize

        x = x if group is None else group.all_reduce(x)
        return add_rmsnorm_quantize(x, residual, self.weight, self.eps, wanted.form)
