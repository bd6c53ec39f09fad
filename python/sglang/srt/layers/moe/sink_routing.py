"""Chooses the experts of a token where shared experts are scored too: they take their part of the weights, which sum to
the router's factor (Inkling)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.layers.moe.topk import TopK
from sglang.srt.layers.ops import ScoreRoutingOp
from sglang.srt.layers.parameter import Init, Scope
from sglang.srt.plan.feed_forward import Router

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch


class SinkTopK(TopK):
    """x [T, H] -> weights [T, k] fp32 and ids [T, k] int32 of the chosen experts, as TopK, and weights [T, sinks] fp32
    of the shared ones."""

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
        spec, route = self.spec, self.route
        by_score: ScoreRoutingOp = route
        logits = self.linear(x, self.weight, self.bias, torch.float32)
        scores, ids = by_score(
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
