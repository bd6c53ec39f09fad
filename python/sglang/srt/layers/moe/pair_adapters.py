"""The LoRA adapters of a layer's experts in one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang.srt.layers.native_adapters import ExpertAdapterKernels, ExpertAdapterWeights

Kernels = ExpertAdapterKernels[
    Callable[[torch.Tensor, torch.Tensor, int, int], Any],
    Callable[[torch.Tensor, torch.Tensor, Any, ExpertAdapterWeights], None],
]


@dataclass(frozen=True, slots=True)
class PairAdapters:
    """What adapters add to the two products of the experts. `slots` [T] int32: the slot of each token's adapter,
    counted from 1; 0: none. `kernels`: those of ADD_EXPERT_ADAPTERS. None for a product that no adapter may change."""

    kernels: Kernels
    slots: torch.Tensor
    up: ExpertAdapterWeights | None
    down: ExpertAdapterWeights | None

    def order(self, ids: torch.Tensor) -> Any:
        """Returns the pairs of a layer, whose tokens chose the experts `ids` [T, k], as both products take them."""
        assert len(self.slots) == len(ids), f"{len(ids)} rows of a step of {len(self.slots)} tokens"
        weights = self.up or self.down
        return None if weights is None else self.kernels.order(self.slots, ids, len(weights.ranks), weights.num_experts)

    def add_up(self, x: torch.Tensor, out: torch.Tensor, pairs: Any) -> None:
        """Adds to gate and up [T * k, N] of x [T, K], before the activation."""
        if self.up is not None:
            self.kernels.add(x, out, pairs, self.up)

    def add_down(self, x: torch.Tensor, out: torch.Tensor, pairs: Any) -> None:
        """Adds to the outputs [T * k, H] of x [T * k, I], before they are weighted."""
        if self.down is not None:
            self.kernels.add(x, out, pairs, self.down)
