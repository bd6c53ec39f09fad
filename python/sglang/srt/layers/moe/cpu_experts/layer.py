"""The experts of a layer that CPUs compute in a step, while the GPU computes the others (`ops`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.configs.activation import Activation
from sglang.srt.layers.moe.cpu_experts.ops import CPU_EXPERTS_OP, MAX_PAIRS, MAX_TOKENS
from sglang.srt.layers.moe.cpu_experts.shared import CpuExperts

if TYPE_CHECKING:
    from sglang.srt.layers.moe.expert_slots import ExpertSlots
    from sglang.srt.plan.plan import Plan


class LayerOnCpus:
    """One layer's part. Steps call `begin`, compute the ids that it returns, and call `end`."""

    def __init__(
        self, plan: Plan, slots: ExpertSlots, activation: Activation, threads: int, shared: CpuExperts
    ) -> None:
        self.kernels, self.shared, self.tables = plan.entry(CPU_EXPERTS_OP), shared, slots.tables
        device = self.tables.clock.device
        self.pool = shared.start(threads, slots.bank[1].rows, device)
        self.number = self.pool.add_layer(*slots.bank, activation)
        if device.type == "cuda":
            assert plan.expert_slots is not None
            shared.connect(device, plan.expert_slots.rate)

    def begin(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor | None:
        """Asks CPUs for some of the experts of ids [T, k] int32 that are in no slot, with `weights` [T, k] fp32 and x
        [T, H]. Returns the ids of the others, -1 elsewhere; None for a step in which CPUs take no part."""
        if not 0 < len(ids) <= MAX_TOKENS or ids.numel() > MAX_PAIRS:
            return None
        request, tables, bell = self.shared.request, self.tables, self.shared.bell
        others = self.kernels.divide(ids, weights, x, tables.slot_of_expert, tables.clock, request)
        if bell is not None:
            bell.ring(self.number + 1)
        elif int(request.asked):
            tokens, top_k = ids.shape
            results = self.pool.run(
                self.number,
                request.x[: x.numel()].view(x.shape),
                request.weights[: ids.numel()].view(tokens, top_k),
                request.ids[: ids.numel()].view(tokens, top_k),
            )
            request.results[: x.numel()] = results.flatten()
        return others

    def end(self, out: torch.Tensor) -> None:
        """Adds what CPUs have computed to out [T, H]."""
        if self.shared.bell is not None:
            self.shared.bell.wait(self.number + 1)
        self.kernels.add(out, self.shared.request)
