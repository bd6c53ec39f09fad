"""Memory for LoRA adapters on a device, and the form of one in main memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.layers.native_adapters import AdapterWeights, ExpertAdapterWeights
from sglang.srt.plan.adapters import AdapterPlan


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """An adapter in main memory, in the form of a slot: A and B of the linear layers that it changes, by the layer's
    number, and the ranks of all [layers, 1] int32."""

    matrices: dict[int, tuple[torch.Tensor, torch.Tensor]]
    ranks: torch.Tensor


class AdapterMemory:
    """A and B of all layers in slots, and the slots of a step's tokens. `count`: the most layers that have any."""

    def __init__(self, plan: AdapterPlan, device: torch.device, dtype: torch.dtype, count: int) -> None:
        self.plan, self.device, self.dtype = plan, device, dtype
        self.slots: torch.Tensor | None = None
        """[T] int32, the slot of each token's adapter in the step that is computed, counted from 1; 0: none. None: no
        token has one."""
        self.ranks = torch.zeros((count, plan.slots), dtype=torch.int32, device=device)
        """The largest rank of a part, by linear layer and slot; 0: the adapter leaves the layer alone."""
        self.linears: list[AdapterWeights | ExpertAdapterWeights] = []
        """Of each linear layer, and of each product of a layer's experts."""

    def load(self, slot: int, adapter: HostAdapter) -> None:
        """Copies an adapter into a slot, counted from 1, on the current stream: steps launched later see it."""
        for number, (a, b) in adapter.matrices.items():
            weights = self.linears[number]
            weights.a[slot - 1].copy_(a, non_blocking=True)
            weights.b[slot - 1].copy_(b, non_blocking=True)
        self.ranks[:, slot - 1 : slot].copy_(adapter.ranks, non_blocking=True)
