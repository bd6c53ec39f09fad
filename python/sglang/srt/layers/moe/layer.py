"""The mixture-of-experts block: route each token to its top experts, which share the ranks by intermediate dims."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.distributed import parallel_state
from sglang.srt.layers.linear import ReplicatedLinear, shard_of
from sglang.srt.layers.parameter import Part, PartKey, Scope


@dataclass(frozen=True, slots=True)
class MoE:
    """Routed experts: each token goes to the `top_k` experts of a softmax router."""

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalize: bool


class SoftmaxMoE:
    """[T, H] -> [T, H]: the top_k experts of the softmax over the router's logits, weighted by it."""

    def __init__(self, scope: Scope, hidden_size: int, spec: MoE) -> None:
        self.top_k = spec.top_k
        self.renormalize = spec.renormalize
        self.router = ReplicatedLinear(scope.sub("router"), hidden_size, spec.num_experts)
        self.w13, self.w2 = _expert_weights(scope, hidden_size, spec)
        self.route = scope.plan.entry("topk_softmax")
        self.experts = scope.plan.entry("fused_moe")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.route(self.router(x), self.top_k, self.renormalize)
        return parallel_state.all_reduce(self.experts(x, self.w13, self.w2, weights, ids))


def _expert_weights(scope: Scope, hidden_size: int, spec: MoE) -> tuple[torch.Tensor, torch.Tensor]:
    """w13 [E, 2I, H] (gate rows, then up rows) and w2 [E, H, I], of this rank's share I of the intermediate dims."""
    intermediate_size, num_experts = spec.intermediate_size, spec.num_experts
    held = shard_of(intermediate_size, scope.tp_rank, scope.tp_size, "expert intermediate size")
    share = held.stop - held.start
    whole = slice(0, hidden_size)
    up_shape, down_shape = (intermediate_size, hidden_size), (hidden_size, intermediate_size)
    w13: dict[PartKey, Part] = {}
    w2: dict[PartKey, Part] = {}
    for e in range(num_experts):
        w13[PartKey("gate", e)] = Part(up_shape, (held, whole), (e, slice(0, share)))
        w13[PartKey("up", e)] = Part(up_shape, (held, whole), (e, slice(share, 2 * share)))
        w2[PartKey("down", e)] = Part(down_shape, (whole, held), (e,))
    return (
        scope.sub("w13").param("weight", (num_experts, 2 * share, hidden_size), w13),
        scope.sub("w2").param("weight", (num_experts, hidden_size, share), w2),
    )
