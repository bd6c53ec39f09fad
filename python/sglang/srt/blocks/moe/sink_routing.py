"""The MoE router of models whose shared experts are scored too: routed and shared weights together sum to the router's
factor (Inkling)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.blocks.moe.routing import TopK
from sglang.srt.blocks.moe.spec import Router
from sglang.srt.layers.parameter import Init, Scope

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch


class SinkTopK(TopK):
    """Routes x [T, H] to weights [T, k] fp32 and ids [T, k] int32 as TopK does, and weights [T, sinks] fp32 of the
    shared experts."""

    def __init__(self, scope: Scope, spec: Router, local: slice) -> None:
        super().__init__(scope, spec, with_shared=False, local=local)
        self.factor = spec.scale
        if spec.scaled:
            self.scale = scope.sub("router").param("global_scale", (1,), init=Init.ONES, dtype=torch.float32)
            scope.finish.append(self._read_factor)

    def _read_factor(self) -> None:
        self.factor = self.spec.scale * float(self.scale)

    def with_sinks(
        self, x: torch.Tensor, batch: ForwardBatch | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns (weights, ids, weights of the shared experts)."""
        spec = self.spec
        assert self.by_score is not None
        logits = self.linear(x, self.weight, self.bias, torch.float32)
        scores, ids = self.by_score(
            logits[:, : -spec.sinks].contiguous(),
            self.correction,
            spec.top_k,
            False,
            (spec.num_groups, spec.top_groups),
            scale=1.0,
            with_shared=False,
            num_valid=None if batch is None else batch.num_valid_tokens,
            expert_map=self.expert_map,
        )
        of_shared = logits[:, -spec.sinks :].sigmoid()
        factor = self.factor / (scores.sum(-1, keepdim=True) + of_shared.sum(-1, keepdim=True))
        return scores * factor, ids, of_shared * factor
