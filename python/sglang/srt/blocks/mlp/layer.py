"""The gated feed-forward block."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from sglang.srt.blocks.mlp.spec import Dense
from sglang.srt.configs.activation import GELU, RELU2, SILU, Activation
from sglang.srt.distributed.groups import Group
from sglang.srt.layers import ops
from sglang.srt.layers.linear import ColumnParallelLinear, RowParallelLinear
from sglang.srt.layers.parameter import Scope
from sglang.srt.layers.quantization.activations import Activations

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch

GATES = {SILU: ops.SILU_AND_MUL, GELU: ops.GELU_AND_MUL, RELU2: ops.RELU2}
"""Ops of activations without parameters."""


class GatedMLP:
    """A feed-forward block, down(f(gate x) * up x) or without a gate down(f(up x)): [T, H] -> [T, H]. Without `reduce`
    it returns this rank's partial sums."""

    def __init__(self, scope: Scope, spec: Dense, reduce: bool = True) -> None:
        tp, gate_up, down = scope.groups.tp, scope.sub("gate_up"), scope.sub("down")
        share, weights = spec.share(tp.rank, tp.size), gate_up.matrix()
        rows = [share.among(len(weights.parts), i) if spec.joined else share for i in range(len(weights.parts))]
        self.gate_up = ColumnParallelLinear(gate_up, weights, dict(zip(weights.parts, rows, strict=True)))
        self.down = RowParallelLinear(down, share, down.matrix(), reduce=reduce)
        self.activation = gate_of(scope, spec.activation)
        self.row_format = self.gate_up.row_format

    def defer_all_reduce(self) -> Group | None:
        """Makes the block return partial sums from now on; returns the group to sum over, None if nothing is to be
        summed."""
        return self.down.defer_all_reduce()

    def __call__(self, x: Activations, batch: ForwardBatch | None = None) -> torch.Tensor:
        return self.down(self.activation(self.gate_up(x)))


def gate_of(scope: Scope, activation: Activation) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the activation op: [T, 2I] -> [T, I], or without a gate [T, I] -> [T, I]."""
    if activation in GATES:
        return scope.plan.entry(GATES[activation])
    return functools.partial(scope.plan.entry(ops.CLAMPED_SWIGLU), activation=activation)
