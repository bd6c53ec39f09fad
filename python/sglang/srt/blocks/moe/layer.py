"""The mixture-of-experts (MoE) block: each token is routed to its top experts.

A rank holds whole experts (expert parallel), a share of each expert's intermediate dims (tensor parallel), or both
(`plan/ranks`). After attention every rank has every token, so each rank computes its part for all tokens and the
results are all-reduced: the same bytes as an exchange of tokens, in half as many collectives (docs/parallelism.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import torch

from sglang.srt.blocks.mlp.alternating import AlternatingMLP
from sglang.srt.blocks.mlp.layer import GatedMLP
from sglang.srt.blocks.moe.routing import TopK
from sglang.srt.blocks.moe.sink_routing import SinkTopK
from sglang.srt.blocks.moe.spec import MoE, Shared
from sglang.srt.configs.activation import Activation
from sglang.srt.distributed.groups import Group
from sglang.srt.errors import UserError
from sglang.srt.layers.layernorm import norm_weight
from sglang.srt.layers.linear import GatheredLinear, ReplicatedLinear
from sglang.srt.layers.moe.cpu_experts.layer import LayerOnCpus
from sglang.srt.layers.moe.fused_moe_triton.tiles import few_pairs
from sglang.srt.layers.moe.output_norm import OutputNorm
from sglang.srt.layers.ops import FUSED_MOE, RMSNORM, TRELLIS_MOE
from sglang.srt.layers.parameter import Scope
from sglang.srt.layers.quantization.activations import MIN_ROWS, Activations, RowFormat, row_format, values_of
from sglang.srt.layers.quantization.expert_sizes import ExpertSizes
from sglang.srt.layers.quantization.experts import experts_of
from sglang.srt.layers.quantization.trellis_experts import TrellisExperts
from sglang.srt.plan.cpu_experts import FLAG
from sglang.srt.plan.needs import key_of_experts

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch


class MoELayer:
    """The MoE block, [T, H] -> [T, H]: the weighted sum of the routed experts' outputs, plus the shared expert's.

    Parameter names: "moe.router" (its linear layer), "moe.correction", "moe.hash"; "moe.w13" and
    "moe.w2" with {expert} and {part}, "moe.experts" where all are one tensor; "moe.shared.gate_up" and
    "moe.shared.down" with {part}, "moe.shared_gate"; "moe.latent_in", "moe.latent_norm", "moe.output_norm" and
    "moe.latent_out" around experts that take a projection.

    Where ranks divide these projections (`spec.cuts_latents`), both are cut by output features. What goes over the wire
    for T tokens and L dims of experts, in units of a part (N - 1) / N of the elements:

        all-gather of "moe.latent_in"                                                  T L
        all-reduce of the experts' sums, which replaces that of hidden states         2 T L
        all-gather of "moe.latent_out"                                                 T H

    Whole projections send 2 T H. With H = 2 L both send the same but for the first line. Cut by input features,
    "moe.latent_in" would need 2 T L, since its norm needs the sum, and "moe.latent_out" T L + 2 T H: a reduce-scatter
    of the experts' sums and the all-reduce of hidden states. The norm of each expert's output comes before the sum over
    experts, on the rank that has the expert, so that sum may go over ranks, too.
    """

    def __init__(self, scope: Scope, spec: MoE) -> None:
        self.activation = spec.activation
        fused = spec.fused_shared
        groups = scope.groups
        self.group = groups.experts
        self.sums_latents = spec.cuts_latents and self.group.size > 1
        self.reduce = self.group.size > 1 and not self.sums_latents
        sizes = ExpertSizes(
            scope.sub("w13").matrix(),
            scope.sub("w2").matrix(),
            spec.num_experts,
            spec.intermediate_size,
            fused,
            spec.form,
            groups.ep.rank,
            groups.ep.size,
        )
        self.first_expert = sizes.local.start
        self.route: TopK
        if spec.router.sinks:
            self.route = SinkTopK(scope, spec.router, sizes.local)
        else:
            self.route = TopK(scope, spec.router, with_shared=fused, local=sizes.local)
        if spec.cpu_threads:
            scope.cpu_experts.place(spec.cpu_threads)
        self.experts = experts_of(scope, sizes, spec.activation.linear_in_up)
        self.on_cpus: LayerOnCpus | None = None
        if spec.cpu_threads:
            scope.finish.append(partial(self._share_with_cpus, scope, spec.cpu_threads))
        quant = self.experts.quant
        scheme = quant.scheme if quant else None
        self.op = key_of_experts(scope.plan.choices, sizes.w2, spec.top_k + fused, scheme)
        self.products: Callable[..., torch.Tensor]
        if isinstance(self.experts, TrellisExperts):
            self.products = scope.plan.entry(TRELLIS_MOE, self.op)
        else:
            self.products = scope.plan.entry(FUSED_MOE, self.op)
        self.configs, self.features = scope.plan.tiles(self.op), scope.plan.arch.features
        self.scales_inputs = spec.router.scales_inputs
        apart = spec.latent_size or self.scales_inputs  # experts take other rows than the shared one and the router
        self.row_format = None if apart else self._row_format(scope, spec)
        self.latent: tuple[GatheredLinear, GatheredLinear] | None = None
        if spec.latent_size:
            into, out_of, share = scope.sub("latent_in"), scope.sub("latent_out"), spec.latent_share
            dims, hidden = (share(n, self.group.rank, self.group.size) for n in (spec.latent_size, into.matrix().cols))
            self.latent = GatheredLinear(into, dims, self.group), GatheredLinear(out_of, hidden, self.group)
        self.latent_norm: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.output_norm: OutputNorm | None = None
        if spec.latent_norms is not None:
            before = norm_weight(scope.sub("latent_norm"), spec.latent_size, zero_centred=True)
            self.latent_norm = partial(scope.plan.entry(RMSNORM), weight=before, eps=spec.latent_norms.eps)
            after = norm_weight(scope.sub("output_norm"), spec.latent_size, zero_centred=True)
            self.output_norm = OutputNorm(after, spec.latent_norms.eps_after)
        self.shared: SharedExpert | None = None
        self.sinks: AlternatingMLP | None = None
        assert not (spec.cuts_latents and spec.shared), "a shared expert's partial sums would be added to a total"
        if spec.shared is not None and spec.shared.members:
            self.sinks = AlternatingMLP(scope.sub("shared"), spec.shared.dense(spec.activation), reduce=False)
        elif spec.shared is not None and not fused:
            self.shared = SharedExpert(scope, spec.shared, spec.activation)

    def _share_with_cpus(self, scope: Scope, threads: int) -> None:
        if self.experts.slots is not None:
            shared = scope.cpu_experts
            try:
                self.on_cpus = LayerOnCpus(scope.plan, self.experts.slots, self.activation, threads, shared)
            except UserError as error:
                raise UserError(f"{error} Start with {FLAG} 0: then the GPU computes all experts.") from None

    def _row_format(self, scope: Scope, spec: MoE) -> RowFormat | None:
        """Returns the format of quantized input rows; None for 16 bits, as experts computed pair by pair need."""
        quant, extra = self.experts.quant, spec.fused_shared
        rows = quant and row_format(scope.plan.choices[self.op], quant.format, scope.plan.arch)
        if not rows:
            return None
        pairs, experts = spec.top_k + extra, spec.num_experts + extra
        return replace(rows, least=next(t for t in count(MIN_ROWS) if not few_pairs(t * pairs, experts)))

    def __call__(self, x: Activations, batch: ForwardBatch | None = None) -> torch.Tensor:
        if isinstance(self.route, SinkTopK):
            weights, ids, of_shared = self.route.with_sinks(values_of(x), batch)
        else:
            (weights, ids), of_shared = self.route(values_of(x), batch), None
        out = self.routed(x, weights, ids)
        if self.shared is not None:
            out = out + self.shared(x)
        if self.sinks is not None:
            out = out + self.sinks(x, weights=of_shared)
        return self.group.all_reduce(out) if self.reduce else out

    def defer_all_reduce(self) -> Group | None:
        """Makes the block return partial sums from now on; returns the group to sum over, None if nothing is to be
        summed."""
        if not self.reduce:
            return None
        self.reduce = False
        return self.group

    def routed(self, x: Activations, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Returns the routed experts' outputs, weighted by `weights` [T, k] and added up: [T, H], this rank's partial
        sums, or the total if it `sums_latents`."""
        rows = x if self.latent is None else self.latent[0](values_of(x))
        if self.latent_norm is not None:
            rows = self.latent_norm(values_of(rows))
        if self.scales_inputs:
            rows, weights = values_of(x) * weights.to(values_of(x).dtype), torch.ones_like(weights)
        others = None if self.on_cpus is None else self.on_cpus.begin(values_of(rows), weights, ids)
        ids = ids if others is None else others
        w13, w2, waves = self.experts.of_step(ids)
        added = None if self.experts.adapters is None else self.experts.adapters.of_step()
        norm = self.output_norm
        out = self.products(
            rows, w13, w2, weights, ids, self.activation, self.configs, self.features, waves, added, norm
        )
        if self.on_cpus is not None and others is not None:
            self.on_cpus.end(out)
        if self.sums_latents:
            out = self.group.all_reduce(out)
        # The projection after the experts is linear, so it applies to each rank's partial sums, too.
        return out if self.latent is None else self.latent[1](out)


class SharedExpert:
    """The shared expert, [T, H] -> this rank's partial sums [T, H]."""

    def __init__(self, scope: Scope, spec: Shared, activation: Activation) -> None:
        self.mlp = GatedMLP(scope.sub("shared"), spec.dense(activation), reduce=False)
        self.gate = ReplicatedLinear(scope.sub("shared_gate")) if spec.gated else None

    def __call__(self, x: Activations) -> torch.Tensor:
        out = self.mlp(x)
        return out if self.gate is None else out * self.gate(values_of(x)).sigmoid()
