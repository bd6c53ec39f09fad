"""Grouped-query attention of a decoder layer, from hidden states to hidden states."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sglang.srt.blocks.block_selection.layer import BlockSelector
from sglang.srt.blocks.gqa.reference import (
    ATTENTION_HEAD_GATE,
    ATTENTION_OUTPUT_GATE,
    QK_NORM_ROPE_STORE,
    QK_WHOLE_NORM,
    VALUE_NORM,
)
from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.blocks.recurrent_state.reference import GATED_RMSNORM
from sglang.srt.blocks.short_convolution.layer import ConvolvedRows, convolution_weight
from sglang.srt.blocks.token_selection.layer import TokenSelector
from sglang.srt.blocks.token_selection.spec import TokenIndexer
from sglang.srt.layers.attention.cache_scale import LayerCacheScales
from sglang.srt.layers.attention.call_site import Attention
from sglang.srt.layers.attention.temperature import growth_of_queries
from sglang.srt.layers.block import Site, SumsInOutput
from sglang.srt.layers.layernorm import norm_weight
from sglang.srt.layers.linear import ColumnParallelLinear, RowParallelLinear
from sglang.srt.layers.parameter import Init, Scope, share_param
from sglang.srt.layers.quantization.activations import Activations, values_of
from sglang.srt.plan.attention_parts import (
    OWN_CACHE,
    ElementGate,
    HeadGate,
    OwnCache,
    PerHead,
    Unweighted,
    Whole,
)
from sglang.srt.plan.fused_rows import FUSED_PART
from sglang.srt.plan.kv_spec import has_tensor_scales
from sglang.srt.plan.masks import RowBlock
from sglang.srt.plan.ranks import ShardRange

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch


class WholeNorm:
    """RMSNorm over all q heads together and over all k heads together, which are sharded over ranks; `k_copies` ranks
    hold the same KV head."""

    def __init__(self, scope: Scope, q_rows: ShardRange, k_rows: ShardRange, k_copies: int, eps: float) -> None:
        self.q_weight = share_param(scope.sub("q_norm"), "weight", q_rows, Init.ONES)
        self.k_weight = share_param(scope.sub("k_norm"), "weight", k_rows, Init.ONES)
        self.totals = (q_rows.total, k_rows.total)
        group = scope.groups.attention
        self.k_copies = k_copies
        self.eps = eps
        self.reduce = group.all_reduce if group.size > 1 else None
        self.norm = scope.plan.entry(QK_WHOLE_NORM)

    def __call__(self, qkv: torch.Tensor) -> None:
        """Normalizes q and k of qkv [T, Q + K + V] in place."""
        self.norm(qkv, self.q_weight, self.k_weight, self.eps, self.totals, self.k_copies, self.reduce)


class GQAttention(SumsInOutput):
    """Grouped-query attention, [T, H] -> [T, H]: one projection to q, k and v; head norms, RoPE and the store into the
    KV cache in one op; attention; output projection."""

    def __init__(self, scope: Scope, spec: GQA, site: Site) -> None:
        dim, hidden_size = spec.head_dim, site.model.hidden_size
        group = scope.groups.attention
        shares = spec.shares(group.size)
        heads, kv_heads = shares.heads(group.rank), shares.kv_heads(group.rank)
        self.num_heads, self.num_kv_heads = shares.padded_heads, shares.padded_kv_heads
        self.head_dim = dim
        self.eps = site.model.norm_eps
        self.rotary = site.rotary.of(spec.rope)
        q_rows, kv_rows = heads.scale_dims(dim), kv_heads.scale_dims(dim)
        self.value_scale, self.is_neox_style = spec.values.scale, spec.rope.is_neox_style
        self.temperature = spec.attn_temperature
        projections = [("q", q_rows), ("k", kv_rows)]
        if not spec.values.from_keys:
            projections.append(("v", kv_heads.scale_dims(spec.v_head_dim)))
        if isinstance(spec.gate, ElementGate) and spec.gate.own_projection:
            projections.append(("gate", heads.scale_dims(spec.v_head_dim)))
        elif isinstance(spec.gate, ElementGate):
            projections = _with_gates(projections, heads, dim)
        if spec.stored.tp_blocks:
            projections = [(FUSED_PART, share) for share in spec.fused_rows(group.size, group.rank)]
        width, dequantized = spec.input_size or hidden_size, spec.dequantized(group.size)
        self.qkv = ColumnParallelLinear(scope.sub("qkv"), width, projections, spec.biases.qkv, dequantized)
        self.row_format = self.qkv.row_format
        self.out = RowParallelLinear(
            scope.sub("o"), heads.scale_dims(spec.v_head_dim), hidden_size, spec.biases.output, group=group
        )
        self.q_norm = self.k_norm = None
        self.whole_norm: WholeNorm | None = None
        if isinstance(spec.qk_norm, PerHead):
            zero_centred = site.model.zero_centred_norms
            self.q_norm = norm_weight(scope.sub("q_norm"), dim, zero_centred)
            self.k_norm = norm_weight(scope.sub("k_norm"), dim, zero_centred)
        elif isinstance(spec.qk_norm, Unweighted):
            self.q_norm = self.k_norm = torch.ones(dim, dtype=scope.dtype, device=scope.device)
        elif isinstance(spec.qk_norm, Whole):
            assert shares.kv_copies is not None, "such layouts are refused"
            self.whole_norm = WholeNorm(scope, q_rows, kv_rows, shares.kv_copies, self.eps)
        self.value_norm: Callable[[torch.Tensor], torch.Tensor] | None = None
        if spec.values.norm:
            value_norm = scope.plan.entry(VALUE_NORM)
            self.value_norm = functools.partial(
                value_norm,
                num_kv_heads=self.num_kv_heads,
                head_dim=dim,
                eps=self.eps,
                from_keys=spec.values.from_keys,
            )
        self.convolution: ConvolvedRows | None = None
        if spec.kv_convolution is not None:
            parts = {"k": kv_rows, "v": kv_heads.scale_dims(spec.v_head_dim)}
            weight = convolution_weight(scope.sub("convolution"), spec.kv_convolution.taps, parts)
            self.convolution = ConvolvedRows(scope, weight, scope.cache(site.layer_id, "kv_rows"), "rows")
        self.relative: ColumnParallelLinear | None = None
        if (bias := spec.softmax.relative_bias) is not None:
            relative = scope.sub("relative")
            self.relative = ColumnParallelLinear(relative, relative.matrix(), {"": heads.scale_dims(bias.dims)})
            self.profiles = scope.sub("profiles").param("proj", (bias.dims, bias.extent))
        self.cache, self.layer_id = scope.cache(site.layer_id, "kv"), site.layer_id
        self.cache_shared = spec.cache == OwnCache(shared=True)
        if has_tensor_scales(scope.plan.kv_cache_dtype):
            LayerCacheScales(scope, self.cache, spec.num_kv_heads)
        self.output_gate = (
            self._output_gate(scope, spec.gate, spec.v_head_dim) if isinstance(spec.gate, ElementGate) else None
        )
        self.head_gate: ColumnParallelLinear | None = None
        if isinstance(spec.gate, HeadGate):
            gate = scope.sub("head_gate")
            self.head_gate = ColumnParallelLinear(gate, gate.matrix(), {"": heads})
            self.gate_heads = softplus_gates if spec.gate.softplus else scope.plan.entry(ATTENTION_HEAD_GATE)
        self.norm_rope_store = scope.plan.entry(QK_NORM_ROPE_STORE)
        self.indexer: BlockSelector | TokenSelector | None = None
        if isinstance(spec.indexer, TokenIndexer):
            self.indexer = TokenSelector(scope, spec, site)
            self.row_format = None  # the indexer's products take 16 bits
        elif spec.indexer is not None:
            self.indexer = BlockSelector(scope, spec, site)
        self.attention = Attention(
            self.cache,
            self.num_heads * spec.mask.rows,
            self.num_kv_heads,
            dim,
            spec.softmax_scale,
            spec.v_head_dim,
            sliding_window=spec.window,
            chunked=spec.mask.chunked,
            logit_cap=spec.softmax.logit_cap,
            sinks=share_param(scope, "sinks", heads, Init.ZEROS, torch.float32) if spec.softmax.sinks else None,
            dcp_size=spec.effective_dcp_size(group.size, scope.groups.context.size),
            bias_extent=spec.softmax.extent,
            top_k=spec.top_k,
        )

    def __call__(self, x: Activations, batch: ForwardBatch) -> torch.Tensor:
        q, k, v, gates = self._stored(x, batch)
        if self.cache_shared:
            batch.metadata[self.attention.site].keys_values[self.layer_id] = (k, v)
        if self.indexer is not None:
            self.indexer(x, batch, batch.metadata[self.attention.site].sparse)
        out = self.attention(q, k, v, batch, self._biases(x, batch))
        if self.output_gate is not None:
            out = self.output_gate(out, gates)
        if self.head_gate is not None:
            out = self.gate_heads(out, self.head_gate(values_of(x)))
        if self.value_scale != 1.0:
            out.mul_(self.value_scale)  # attention is linear in v; here there is one tensor, of new tokens only
        return self.out(out)

    def _output_gate(
        self, scope: Scope, gate: ElementGate, dim: int
    ) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Returns what gates the output [T, Hq * dim]."""
        if not gate.normed:
            return scope.plan.entry(ATTENTION_OUTPUT_GATE)
        gated_norm, eps = scope.plan.entry(GATED_RMSNORM), self.eps
        ones = torch.ones(dim, dtype=scope.dtype, device=scope.device)
        return lambda x, gates: gated_norm(x.view(len(x), -1, dim), gates, ones, eps, sigmoid=True)

    def _biases(self, x: Activations, batch: ForwardBatch) -> torch.Tensor | None:
        """Returns the score biases [T, Hq, E] by distance; None for layers without any."""
        if self.relative is None:
            return None
        rows = self.relative(values_of(x))
        if self.temperature is not None:
            rows = (rows * growth_of_queries(batch, self.temperature)).to(rows.dtype)
        return (rows.view(-1, len(self.profiles)) @ self.profiles).view(len(rows), self.num_heads, -1)

    def _stored(
        self, x: Activations, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns q [T, Hq, D], k and v [T, Hkv, D], which are in the cache now, and the output's gates."""
        cache, scales = self.cache, self.cache.group_scales()
        positions, cos_sin = self.rotary.at(batch.rotary_positions)
        qkv = gates = self.qkv(x)
        if self.whole_norm is not None:
            self.whole_norm(qkv)
        if self.value_norm is not None:
            qkv = self.value_norm(qkv)
        if self.convolution is not None:
            self.convolution.in_place(qkv[:, self.num_heads * self.head_dim :], batch)
        if self.temperature is not None and self.q_norm is None:  # a rotation keeps factors
            qkv[:, : self.num_heads * self.head_dim] *= growth_of_queries(batch, self.temperature).to(qkv.dtype)
        if self.output_gate is not None:
            width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
            qkv, gates = qkv[:, :width], qkv[:, width:]
        q, k, v = self.norm_rope_store(
            qkv=qkv,
            positions=positions,
            cos_sin=cos_sin,
            q_weight=self.q_norm,
            k_weight=self.k_norm,
            eps=self.eps,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            k_cache=cache.k,
            v_cache=cache.v,
            out_cache_loc=batch.slots_of(cache).out_cache_loc,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            is_neox_style=self.is_neox_style,
            k_group_scales=scales.get("k_group_scales"),
            v_group_scales=scales.get("v_group_scales"),
        )
        if self.temperature is not None and self.q_norm is not None:
            q.mul_(growth_of_queries(batch, self.temperature)[..., None])
        return q, k, v, gates


def softplus_gates(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Multiplies each head of x [T, heads * D] in place by the softplus of its gate [T, heads], and returns x."""
    heads = x.unflatten(-1, (gate.shape[-1], -1))
    heads *= torch.nn.functional.softplus(gate.float()).to(x.dtype)[..., None]
    return x


BLOCK_STARTS = "block_starts"
"""Key of a step's cache: the position [R] int32 of each request's first row in a causal block."""


class BlockAttention(GQAttention):
    """Attention of a block draft, whose rows come in blocks of one request each (`RowBlock`), [R * B, H] -> [R * B,
    H]."""

    def __init__(self, scope: Scope, spec: GQA, site: Site) -> None:
        assert not isinstance(spec.gate, ElementGate) and spec.cache == OWN_CACHE
        super().__init__(scope, spec, site)
        self.block = spec.mask.rows
        self.causal = isinstance(spec.mask, RowBlock) and spec.mask.causal
        if (sinks := self.attention.sinks) is not None and not self.causal:  # rows that count as heads have theirs
            self.attention.sinks = sinks.new_empty(self.num_heads * self.block)
            scope.finish.append(functools.partial(self._take_sinks, sinks))

    def keep(self, x: Activations, batch: ForwardBatch) -> None:
        """Stores keys and values of x [T, H] at the batch's tokens."""
        self._stored(x, batch)

    def __call__(self, x: Activations, batch: ForwardBatch) -> torch.Tensor:
        q, k, v, _ = self._stored(x, batch)
        rows = self._attend_causally(q, batch) if self.causal else self._attend(q, k, v, batch)
        if self.head_gate is not None:
            rows = self.gate_heads(rows, self.head_gate(values_of(x)))
        if self.value_scale != 1.0:
            rows.mul_(self.value_scale)
        return self.out(rows)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Returns the output [R * B, Hq * Dv] of rows that see the whole block: they count as heads of one row."""
        group = self.num_heads // self.num_kv_heads
        blocks = q.reshape(-1, self.block, self.num_kv_heads, group, self.head_dim).transpose(1, 2)
        out = self.attention(blocks.reshape(len(blocks), -1, self.head_dim), k, v, batch)
        rows = out.view(-1, self.num_kv_heads, self.block, group * self.head_dim).transpose(1, 2)
        return rows.reshape(len(q), -1)

    def _attend_causally(self, q: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Returns the output [R * B, Hq * Dv] of rows that see those of their block before them."""
        starts = batch.step_cache.get(BLOCK_STARTS)
        if starts is None:
            starts = batch.step_cache[BLOCK_STARTS] = batch.positions[:: self.block].to(torch.int32)
        out = torch.empty((*q.shape[:2], self.attention.v_head_dim), dtype=q.dtype, device=q.device)
        metadata = batch.metadata[self.attention.site].decode
        assert metadata is not None
        features: dict[str, Any] = {"starts": starts}
        metadata.attend(q, self.attention, out, **features)
        return out.flatten(1)

    def _take_sinks(self, sinks: torch.Tensor) -> None:
        """Gives every row of a block the sinks [heads] of its heads, in the order in which rows count as heads."""
        assert self.attention.sinks is not None
        of_rows = self.attention.sinks.view(self.num_kv_heads, self.block, -1)
        of_rows.copy_(sinks.view(self.num_kv_heads, 1, -1).expand_as(of_rows))


def _with_gates(projections: list[tuple[str, ShardRange]], heads: ShardRange, dim: int) -> list[tuple[str, ShardRange]]:
    """Appends the gates of this rank's heads behind q, k and v; q_proj stores each head's gate after the head."""
    (part, rows), *others = projections

    def pieces(behind: int) -> list[tuple[str, ShardRange]]:
        begins = [2 * head * dim + behind for head in range(heads.run.start, heads.run.stop)]
        widths = [dim] * (heads.count - 1) + [dim * (1 + heads.padded_count - heads.count)]
        runs = [slice(begin, begin + dim) for begin in begins]
        return [(part, ShardRange(2 * rows.total, run, width)) for run, width in zip(runs, widths, strict=True)]

    return [*pieces(0), *others, *pieces(dim)]
