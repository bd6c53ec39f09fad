"""Memory for LoRA adapters on a device, and the form of one in main memory."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang.srt.layers.native_adapters import AdapterWeights, ExpertAdapterWeights
from sglang.srt.plan.adapters import AdapterPlan


@dataclass(slots=True)
class HostAdapter:
    """An adapter in main memory, in the form of a slot: A and B of the linear layers that it changes, by the layer's
    number, and the ranks of all [layers, 1] int32. `absorbs`: prompts with it take latents as they are. `lengths` [N]
    fp32, by such numbers: those that DoRA gives the rows, NaN for rows that stay as they are; `scales` [2, N]: what
    becomes of them, as in `AdapterMemory`."""

    matrices: dict[int, tuple[torch.Tensor, torch.Tensor]]
    ranks: torch.Tensor
    absorbs: bool = False
    lengths: dict[int, torch.Tensor] = field(default_factory=dict)
    scales: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens of a step that has adapters, or some of its rows."""

    slots: torch.Tensor
    """[T] int32, the slot of each token's adapter, counted from 1; 0: none."""
    ordered: Any
    """The tokens as the kernels of linear layers take them."""
    by_head: dict[int, Any] = field(default_factory=dict)
    """Pairs of a token and each of so many heads, as the kernels of experts take them."""


class _Running(threading.local):
    """The tokens of the step that a thread computes; of two microbatches each may have its thread."""

    tokens: StepTokens | None = None


class AdapterMemory:
    """A and B of all layers in slots, and the slots of a step's tokens. `count`: the most layers that have any."""

    def __init__(self, plan: AdapterPlan, device: torch.device, dtype: torch.dtype, count: int) -> None:
        self.plan, self.device, self.dtype = plan, device, dtype
        self._running = _Running()
        self.absorbing: set[int] = set()
        """Slots, counted from 1, of adapters with which prompts take latents as they are."""
        self.ranks = torch.zeros((count, plan.slots), dtype=torch.int32, device=device)
        """The largest rank of a part, by linear layer and slot; 0: the adapter leaves the layer alone."""
        self.linears: list[AdapterWeights | ExpertAdapterWeights] = []
        """Of each linear layer, and of each product of a layer's experts."""
        self.scales: dict[int, torch.Tensor] = {}
        """By a linear layer's number and for each slot, [1 + slots, 2, N] fp32: what DoRA multiplies the layer's own
        output by, and what it then adds, the share of the bias. The first place is for tokens without an adapter."""

    @property
    def tokens(self) -> StepTokens | None:
        """Returns the tokens of the step that is computed; None: none of them has an adapter."""
        return self._running.tokens

    @tokens.setter
    def tokens(self, tokens: StepTokens | None) -> None:
        self._running.tokens = tokens

    def load(self, slot: int, adapter: HostAdapter) -> None:
        """Copies an adapter into a slot, counted from 1, on the current stream: steps launched later see it."""
        for number, (a, b) in adapter.matrices.items():
            weights = self.linears[number]
            weights.a[slot - 1].copy_(a, non_blocking=True)
            weights.b[slot - 1].copy_(b, non_blocking=True)
        for number, places in self.scales.items():
            places[slot].copy_(adapter.scales[number] if number in adapter.scales else places[0])
        self.ranks[:, slot - 1 : slot].copy_(adapter.ranks, non_blocking=True)
        (self.absorbing.add if adapter.absorbs else self.absorbing.discard)(slot)
