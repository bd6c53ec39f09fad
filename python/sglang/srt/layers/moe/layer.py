"""The mixture-of-experts block: each token goes to its top experts, which share the ranks by intermediate dims."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from sglang.srt.configs.quant_rules import ModuleQuant
from sglang.srt.configs.quant_scheme import expert_share
from sglang.srt.distributed import parallel_state
from sglang.srt.layers import native_ops
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.mlp import Dense, GatedMLP
from sglang.srt.layers.moe.expert_weights import SILU, Activation
from sglang.srt.layers.moe.fused_moe_triton.config_files import TunedTiles, lookup
from sglang.srt.layers.moe.topk import Router, TopK
from sglang.srt.layers.parameter import Scope
from sglang.srt.layers.quantization.experts import Experts, ExpertSizes, expert_quant

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shared:
    """An expert that every token goes to; `gated`: weighted by the sigmoid of a linear layer's one output."""

    intermediate_size: int
    gated: bool = False


@dataclass(frozen=True, slots=True)
class MoE:
    """Routed experts of one intermediate size, and a shared one. `bias`: the experts have biases. `form`: how 16-bit
    checkpoints keep the experts, as in `quantization.experts.ExpertSizes`."""

    num_experts: int
    intermediate_size: int
    router: Router
    activation: Activation = SILU
    bias: bool = False
    shared: Shared | None = None
    form: str = ""


class MoELayer:
    """[T, H] -> [T, H]: the sum of the chosen experts' outputs by their weights, and of the shared expert's.

    Checkpoint names that families give: "moe.router" (its linear layer), "moe.correction", "moe.hash"; "moe.w13" and
    "moe.w2" with {expert} and {part}, "moe.experts" where all are one tensor; "moe.shared.gate_up" and
    "moe.shared.down" with {part}, "moe.shared_gate".
    """

    def __init__(self, scope: Scope, hidden_size: int, spec: MoE) -> None:
        self.activation = spec.activation
        sizes = ExpertSizes(spec.num_experts, hidden_size, spec.intermediate_size, spec.bias, form=spec.form)
        apart = why_apart(scope, spec, sizes)
        fused = spec.shared is not None and apart is None
        self.route = TopK(scope, hidden_size, spec.num_experts, spec.router, with_shared=fused)
        self.experts = Experts(scope, replace(sizes, shared=fused), spec.activation.linear_in_up)
        self.products = scope.plan.entry("fused_moe")
        self.features = scope.plan.arch.features
        self.tuned = _tuned_tiles(scope, replace(sizes, shared=fused), self.experts.quant)
        self.shared: SharedExpert | None = None
        if spec.shared is not None and not fused:
            _say_once(f"the shared expert is computed apart from the routed ones: {apart}")
            self.shared = SharedExpert(scope, hidden_size, spec.shared, spec.activation)

    def __call__(self, x: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        weights, ids = self.route(x, batch)
        w13, w2 = self.experts.w13, self.experts.w2
        tiles = self.tuned.for_launch(*ids.shape) if self.tuned is not None else None
        out: torch.Tensor = self.products(x, w13, w2, weights, ids, self.activation, tiles, self.features)
        if self.shared is not None:
            out = out + self.shared(x)
        return parallel_state.all_reduce(out)


class SharedExpert:
    """[T, H] -> this rank's summand of [T, H]."""

    def __init__(self, scope: Scope, hidden_size: int, spec: Shared, activation: Activation) -> None:
        gate = None if activation == SILU else functools.partial(native_ops.gated, activation=activation)
        self.mlp = GatedMLP(scope.sub("shared"), hidden_size, Dense(spec.intermediate_size), reduce=False, gate=gate)
        self.gate = ReplicatedLinear(scope.sub("shared_gate"), hidden_size, 1) if spec.gated else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self.mlp(x)
        return out if self.gate is None else out * self.gate(x).sigmoid()


def why_apart(scope: Scope, spec: MoE, sizes: ExpertSizes) -> str | None:
    """Why the shared expert cannot be one more of the routed ones; None: it can."""
    shared, config = spec.shared, scope.plan.model.quantization
    if shared is None:
        return "there is none"
    if not scope.plan.fuse_shared_experts:
        return "--disable-shared-experts-fusion"
    if shared.gated:
        return "it has a gate of its own"
    if shared.intermediate_size != spec.intermediate_size:
        return f"its intermediate size is {shared.intermediate_size}, theirs {spec.intermediate_size}"
    if spec.form or spec.bias:
        return "the checkpoint keeps the experts together"
    if config is not None:
        own, theirs = scope.sub("shared"), expert_quant(scope, sizes)
        modules = [own.sub("gate_up").module("gate"), own.sub("gate_up").module("up"), own.sub("down").module("down")]
        other = [quant for quant in map(config.of, modules) if quant != theirs]
        if other:
            own_name, their_name = (quant.scheme if quant else "16 bits" for quant in (other[0], theirs))
            return f"its weights are {own_name}, theirs {their_name}"
    return None


def _tuned_tiles(scope: Scope, sizes: ExpertSizes, quant: ModuleQuant | None) -> TunedTiles | None:
    """Of a tuning file for this rank's shape and GPU, if there is one that fits."""
    arch = scope.plan.arch
    if arch.capability is None:
        return None
    share = expert_share(sizes.intermediate_size, scope.tp_size, quant.format if quant else None)
    scheme = quant.scheme if quant else None
    return lookup(sizes.held_experts, share, scheme, arch, hidden=sizes.hidden_size, bias=sizes.bias)


@functools.cache
def _say_once(message: str) -> None:
    logger.info(message)
