"""A dense MLP and routed experts side by side, each between norms of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.blocks.moe.layer import MoELayer
from sglang.srt.blocks.moe.spec import MoE
from sglang.srt.layers.block import DefersNoSum, Site
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.ops import RMSNORM
from sglang.srt.layers.parameter import Convert, Init, Scope, TensorPart
from sglang.srt.plan.weight_names import PartKey

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch


class ExpertBranches(DefersNoSum):
    """Computes norm(MLP(norm x)) + norm(experts(norm x)) of the residual stream x, [T, H] -> [T, H]. The router reads a
    norm of the stream whose weight includes the factor 1 / sqrt(H); each expert's routing weights are multiplied by a
    scale of its own. Source: Gemma 4.

    Checkpoint names beside those of MoELayer: "moe.dense_norm" and "moe.dense_norm_after" of the MLP, which is the
    shared expert, "moe.experts_norm", "moe.experts_norm_after", and "moe.router_scales" with the leaves scale and
    per_expert_scale.
    """

    def __init__(self, scope: Scope, spec: MoE, site: Site) -> None:
        hidden_size, self.eps = site.model.hidden_size, site.model.norm_eps

        def norm(name: str) -> RMSNorm:
            return RMSNorm(scope.sub(name), hidden_size, self.eps, site.model.zero_centred_norms)

        self.dense_norm, self.dense_norm_after = norm("dense_norm"), norm("dense_norm_after")
        self.experts_norm, self.experts_norm_after = norm("experts_norm"), norm("experts_norm_after")
        self.moe = MoELayer(scope, spec)
        scales = scope.sub("router_scales")
        shrink = hidden_size**-0.5
        self.router_weight = _fp32(scales, "scale", hidden_size, lambda stored: stored.float() * shrink)
        self.expert_scale = _fp32(scales, "per_expert_scale", spec.num_experts)
        self.router_norm = scope.plan.entry(RMSNORM)

    def __call__(self, x: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        assert self.moe.shared is not None
        weights, ids = self.moe.route(self.router_norm(x, self.router_weight, self.eps), batch)
        # Where the id is -1, any will do: such a choice adds nothing.
        weights = weights * self.expert_scale[ids.long() + self.moe.first_expert]
        branches = (
            self.moe.shared(self.dense_norm(x, None)[0]),
            self.moe.routed(self.experts_norm(x, None)[0], weights, ids),
        )
        dense, experts = self.moe.group.all_reduce(torch.stack(branches)).unbind()
        return self.dense_norm_after(dense, None)[0] + self.experts_norm_after(experts, None)[0]


def _fp32(scope: Scope, leaf: str, size: int, convert: Convert | None = None) -> torch.Tensor:
    return scope.param(leaf, (size,), {PartKey(): TensorPart((size,), convert=convert)}, Init.ONES, torch.float32)
