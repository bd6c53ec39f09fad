"""Attention of layers that reuse the keys and values of an earlier layer and compute queries only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.blocks.gqa.reference import Q_NORM_ROPE
from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.layers.attention.call_site import Attention
from sglang.srt.layers.block import Site, SumsInOutput
from sglang.srt.layers.layernorm import norm_weight
from sglang.srt.layers.linear import ColumnParallelLinear, RowParallelLinear
from sglang.srt.layers.parameter import Scope
from sglang.srt.plan.attention_parts import CacheOfLayer, PerHead

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch


class SharedCacheAttention(SumsInOutput):
    """Attention over the cache of layer `spec.cache.layer`, [T, H] -> [T, H]. That layer puts the keys and values of
    prompts into their site's metadata; decoding rows only read the cache."""

    def __init__(self, scope: Scope, spec: GQA, site: Site) -> None:
        assert (
            isinstance(spec.cache, CacheOfLayer)
            and isinstance(spec.qk_norm, PerHead)
            and spec.gate is None
            and not spec.softmax.sinks
        )
        dim, hidden_size = spec.head_dim, site.model.hidden_size
        group = scope.groups.attention
        shares = spec.shares(group.size)
        rows = shares.heads(group.rank).scale_dims(dim)
        self.source = spec.cache.layer
        self.eps = site.model.norm_eps
        self.rotary = site.rotary.of(spec.rope)
        self.q = ColumnParallelLinear(scope.sub("qkv"), hidden_size, {"q": rows}, spec.biases.qkv)
        self.out = RowParallelLinear(scope.sub("o"), rows, hidden_size, spec.biases.output, group=group)
        self.q_norm = norm_weight(scope.sub("q_norm"), dim, site.model.zero_centred_norms)
        self.norm_rope = scope.plan.entry(Q_NORM_ROPE)
        self.attention = Attention(
            scope.cache(spec.cache.layer, "kv"),
            shares.padded_heads,
            shares.padded_kv_heads,
            dim,
            spec.softmax_scale,
            sliding_window=spec.window,
            logit_cap=spec.softmax.logit_cap,
        )

    def __call__(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        positions, cos_sin = self.rotary.at(batch.rotary_positions)
        heads = self.q(x).unflatten(-1, (-1, self.attention.head_dim))
        q = self.norm_rope(heads, positions, cos_sin, self.q_norm, self.eps)
        k = v = q
        if batch.extend is not None:
            k, v = batch.metadata[self.attention.site].keys_values[self.source]
        return self.out(self.attention(q, k, v, batch))
