"""What stands in the place of a class's attention, products and experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from sglang.srt.blocks.gqa.reference import QK_NORM_ROPE_STORE
from sglang.srt.blocks.transformers_layer.rotation import AnglesOfStep
from sglang.srt.blocks.transformers_layer.spec import ROWS, TransformersExperts, TransformersLayer
from sglang.srt.layers.attention.cache_scale import LayerCacheScales
from sglang.srt.layers.attention.call_site import Attention
from sglang.srt.layers.linear import ColumnParallelLinear, RowParallelLinear
from sglang.srt.layers.ops import FUSED_MOE
from sglang.srt.layers.parameter import Init, Scope, share_param
from sglang.srt.layers.quantization.expert_sizes import ExpertSizes
from sglang.srt.layers.quantization.experts import Experts
from sglang.srt.layers.rotary_embedding import RotaryTables
from sglang.srt.plan.kv_spec import has_tensor_scales
from sglang.srt.plan.needs import key_of_experts
from sglang.srt.plan.transformers_backend.facts import LinearFact

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch


@dataclass(slots=True)
class CurrentStep:
    """The step that a model computes: classes hand on no batch to the functions that they call."""

    batch: ForwardBatch | None = field(default=None)
    angles: AnglesOfStep | None = field(default=None)


class LayerAttention:
    """The attention of a class's layer over our cache."""

    def __init__(
        self, scope: Scope, spec: TransformersLayer, layer_id: int, rotary: RotaryTables, step: CurrentStep
    ) -> None:
        assert spec.attention is not None
        self.fact, self.step, self.layer_id = spec.attention, step, layer_id
        group = scope.groups.attention
        shares = spec.shares(group.size)
        rank = group.rank if spec.attends_in_shares else 0
        self.num_heads, self.num_kv_heads = shares.padded_heads, shares.padded_kv_heads
        self.head_dim, self.dtype = spec.head_dim, scope.dtype
        self.rotary = rotary.of(spec.rope)
        self.cache = scope.cache(layer_id, "kv")
        self.store = scope.plan.entry(QK_NORM_ROPE_STORE)
        self.sinks: torch.Tensor | None = None
        if self.fact.sinks:
            module, _, leaf = self.fact.sinks.rpartition(".")
            self.sinks = share_param(scope.sub(module), leaf, shares.heads(rank), Init.ZEROS, torch.float32)
        if has_tensor_scales(scope.plan.kv_cache_dtype):
            LayerCacheScales(scope.sub(self.fact.module), self.cache, spec.num_kv_heads)
        self.attention = Attention(
            self.cache,
            self.num_heads,
            self.num_kv_heads,
            spec.head_dim,
            spec.softmax_scale,
            spec.v_head_dim,
            sliding_window=spec.window,
            logit_cap=spec.softmax.logit_cap,
            sinks=self.sinks,
        )

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Returns [1, T, Hq, Dv] for query [1, Hq, T, D], key [1, Hkv, T, D] and value [1, Hkv, T, Dv]."""
        batch = self.step.batch
        assert batch is not None, "a step is being computed"
        if batch.loads is not None:
            batch.loads.before(self.layer_id)
        # Heads that the class has rotated are stored as they are: rotated by an angle of 0.
        rows = torch.cat([heads[0].transpose(0, 1).flatten(1).to(self.dtype) for heads in (query, key, value)], dim=-1)
        if self.fact.rotary_dim:
            assert self.step.angles is not None, "the class has just called `rotate`"
            positions, cos_sin = self.step.angles.take()
        else:
            positions, cos_sin = self.rotary.at(batch.positions)
        scales = self.cache.group_scales()
        q, k, v = self.store(
            qkv=rows,
            positions=positions,
            cos_sin=cos_sin,
            q_weight=None,
            k_weight=None,
            eps=0.0,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            k_cache=self.cache.k,
            v_cache=self.cache.v,
            out_cache_loc=batch.slots_of(self.cache).out_cache_loc,
            k_scale=self.cache.k_scale,
            v_scale=self.cache.v_scale,
            k_group_scales=scales.get("k_group_scales"),
            v_group_scales=scales.get("v_group_scales"),
        )
        out = self.attention(q, k, v, batch)
        return out.view(1, len(out), self.num_heads, -1)


class ClassNorm(torch.nn.Module):
    """An RMS norm in the place of a class's."""

    def __init__(self, weight: torch.Tensor, eps: float, norm: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.weight, self.eps, self.norm = torch.nn.Parameter(weight, requires_grad=False), eps, norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x [..., C] normalized."""
        return self.norm(x.reshape(-1, x.shape[-1]), self.weight, self.eps).view(x.shape)


class TransformersLinear(torch.nn.Module):
    """A product in the place of a class's linear layer: x [..., in] -> [..., out], of this rank's share."""

    def __init__(self, scope: Scope, spec: TransformersLayer, linear: LinearFact) -> None:
        super().__init__()
        group = scope.groups.attention
        rows = spec.rows_of(linear, group.size, group.rank)
        cols = spec.cols_of(linear, group.size, group.rank)
        self.product: ColumnParallelLinear | RowParallelLinear
        if linear.style == ROWS:
            self.product = RowParallelLinear(scope, cols, scope.matrix(), group=group)
        else:
            self.product = ColumnParallelLinear(scope, scope.matrix(), [("", run) for run in rows])
        self.in_features, self.out_features = cols.padded_count, sum(run.padded_count for run in rows)
        self.weight = torch.empty(0, dtype=scope.dtype, device=scope.device)
        """Without elements: classes ask it for its dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [..., out]."""
        return self.product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self.out_features)


class RoutedExperts:
    """The routed experts of a class's layer, whose choice the class makes."""

    def __init__(self, scope: Scope, spec: TransformersExperts, step: CurrentStep) -> None:
        groups = scope.groups
        sizes = ExpertSizes(
            scope.sub("w13").matrix(),
            scope.sub("w2").matrix(),
            spec.num_experts,
            spec.intermediate_size,
            False,
            spec.form,
            groups.ep.rank,
            groups.ep.size,
        )
        self.group, self.activation, self.local, self.step = groups.experts, spec.activation, sizes.local, step
        self.experts = Experts(scope, sizes, spec.activation.linear_in_up)
        quant = self.experts.quant
        op = key_of_experts(scope.plan.choices, sizes.w2, spec.top_k, quant.scheme if quant else None)
        self.products = scope.plan.entry(FUSED_MOE, op)
        self.configs, self.features = scope.plan.tiles(op), scope.plan.arch.features

    def __call__(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Returns [T, H], the weighted sum of the outputs of the experts `chosen` [T, k], with `weights` [T, k], for
        hidden [T, H]."""
        batch, here = self.step.batch, (chosen >= self.local.start) & (chosen < self.local.stop)
        if batch is not None and batch.num_valid_tokens is not None:  # padding needs no experts
            here &= (torch.arange(len(chosen), device=chosen.device) < batch.num_valid_tokens)[:, None]
        ids = torch.where(here, chosen - self.local.start, -1).to(torch.int32)
        experts, scales = self.experts, weights.to(torch.float32)
        w13, w2, waves = experts.of_step(ids)
        out = self.products(hidden, w13, w2, scales, ids, self.activation, self.configs, self.features, waves)
        return self.group.all_reduce(out) if self.group.size > 1 else out


def attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Computes the attention of a class's layer, whose arguments the plan has compared with ours. Registered with
    transformers."""
    return module.attention_of_step(query, key, value), None


def compute_experts(module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Computes the experts of a class's layer. Registered with transformers."""
    out: torch.Tensor = module.experts_of_layer(hidden, chosen, weights)
    return out
