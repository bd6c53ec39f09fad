"""The gated feed-forward block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang.srt.layers.linear import ColumnParallelLinear, RowParallelLinear, shard_of
from sglang.srt.layers.parameter import Scope


@dataclass(frozen=True, slots=True)
class Dense:
    """A gated feed-forward block of this width."""

    intermediate_size: int
    bias: bool = False


class GatedMLP:
    """down(silu(gate x) * up x): [T, H] -> [T, H]. Without `reduce` it is this rank's summand of that. `gate`, of
    [T, 2I] -> [T, I], stands in for silu(gate) * up."""

    def __init__(
        self,
        scope: Scope,
        hidden_size: int,
        spec: Dense,
        reduce: bool = True,
        gate: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        rows = shard_of(spec.intermediate_size, scope.tp_rank, scope.tp_size, "intermediate size")
        halves = {"gate": (spec.intermediate_size, rows), "up": (spec.intermediate_size, rows)}
        self.gate_up = ColumnParallelLinear(scope.sub("gate_up"), hidden_size, halves, spec.bias)
        self.down = RowParallelLinear(scope.sub("down"), spec.intermediate_size, hidden_size, spec.bias, reduce)
        self.activation = gate or scope.plan.entry("silu_and_mul")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.gate_up(x)))
