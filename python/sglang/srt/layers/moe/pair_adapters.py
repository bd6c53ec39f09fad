"""The LoRA adapters of a layer's experts in one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang.srt.layers.native_adapters import ExpertAdapterWeights

Add = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, ExpertAdapterWeights], None]


@dataclass(frozen=True, slots=True)
class PairAdapters:
    """What adapters add to the two products of the experts. `slots` [T] int32: the slot of each token's adapter,
    counted from 1; 0: none. `kernel`: that of ADD_EXPERT_ADAPTERS. None for a product that no adapter may change."""

    kernel: Add
    slots: torch.Tensor
    up: ExpertAdapterWeights | None
    down: ExpertAdapterWeights | None

    def add_up(self, x: torch.Tensor, out: torch.Tensor, ids: torch.Tensor) -> None:
        """Adds to gate and up [T * k, N] of x [T, K], before the activation."""
        self._add(x, out, ids, self.up)

    def add_down(self, x: torch.Tensor, out: torch.Tensor, ids: torch.Tensor) -> None:
        """Adds to the outputs [T * k, H] of x [T * k, I], before they are weighted."""
        self._add(x, out, ids, self.down)

    def _add(self, x: torch.Tensor, out: torch.Tensor, ids: torch.Tensor, weights: ExpertAdapterWeights | None) -> None:
        if weights is not None:
            assert len(self.slots) == len(ids), f"{len(ids)} rows of a step of {len(self.slots)} tokens"
            self.kernel(x, out, self.slots, ids, weights)
