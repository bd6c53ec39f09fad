"""The projections that the variants of latent attention (MLA) share."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang.srt.blocks.gqa.reference import ATTENTION_HEAD_GATE, ATTENTION_OUTPUT_GATE
from sglang.srt.blocks.mla.reference import LATENT_ABSORB
from sglang.srt.blocks.mla.spec import MLA
from sglang.srt.layers.block import Site, SumsInOutput
from sglang.srt.layers.latent_adapters import LatentAdapters, LatentDims
from sglang.srt.layers.linear import ColumnParallelLinear, RowParallelLinear
from sglang.srt.layers.ops import LINEAR
from sglang.srt.layers.parameter import Init, Scope, TensorPart, WeightShard, constant
from sglang.srt.plan.attention_parts import ElementGate, HeadGate
from sglang.srt.plan.ranks import ShardRange, whole
from sglang.srt.plan.weight_names import PartKey


class LatentHeads(SumsInOutput):
    """The projections of MLA. `qkv_a`: hidden states [T, H] -> query latent and KV latent [T, rank + rope]; `q_b`:
    normalized query latent -> query heads; W_UK and W_UV, the halves of `kv_b_proj`; `o`: heads -> [T, H]."""

    def __init__(self, scope: Scope, spec: MLA, site: Site) -> None:
        self.spec, self.per_head = spec, scope.plan.entry(LATENT_ABSORB)
        shares = spec.shares(scope.groups.attention.size)
        self.num_heads = shares.padded_heads
        self.head_rows = shares.heads(scope.groups.attention.rank)
        self._build_projections(scope, site.model.hidden_size, self.head_rows)

    def _build_projections(self, scope: Scope, hidden_size: int, heads: ShardRange) -> None:
        spec, rank = self.spec, self.spec.kv_lora_rank
        q_rows = heads.scale_dims(spec.qk_dim)
        # Every rank computes the latents completely; queries without a latent are sharded by head beside them.
        queries = {"q_a_proj": whole(spec.q_lora_rank)} if spec.q_lora_rank else {"q_proj": q_rows}
        projections = {**queries, "kv_a_proj_with_mqa": whole(spec.latent_dim)}
        self.qkv_a = ColumnParallelLinear(scope.sub("qkv_a"), spec.input_size or hidden_size, projections)
        self.qkv_sizes = [rows.padded_count for rows in projections.values()]
        if spec.q_lora_rank:
            self.q_norm = self._norm(scope.sub("q_a_norm"), spec.q_lora_rank, hidden_size)
            self.q_b = ColumnParallelLinear(scope.sub("q_b"), spec.q_lora_rank, {"": q_rows})
        self.kv_norm = self._norm(scope.sub("kv_a_norm"), rank, hidden_size)
        shard = WeightShard("", heads.scale_dims(spec.nope_dim + spec.v_dim), whole(rank))
        kv_b = scope.sub("kv_b")
        scope.quant.create_unpacked(kv_b, shard, self._take_up)
        self.adapters: LatentAdapters | None = None
        if scope.adapters is not None:
            dims = LatentDims(heads, spec.nope_dim, spec.v_dim, rank)
            self.adapters = scope.adapters.latent(kv_b.module(), dims)
        values = heads.scale_dims(spec.v_dim)
        self.out = RowParallelLinear(scope.sub("o"), values, hidden_size, group=scope.groups.attention)

    def _norm(self, scope: Scope, size: int, hidden_size: int) -> torch.Tensor:
        """Returns the weight of a latent's norm, with the factor by which the normed latent is multiplied."""
        if not self.spec.norms.scaled:
            return scope.param("weight", (size,), init=Init.ONES)
        factor = self.spec.norms.factor(hidden_size, size)
        part = TensorPart((size,), convert=lambda weight: weight.float() * factor)
        return scope.param("weight", (size,), {PartKey(): part}, constant(factor), torch.float32)

    def _absorb(self, q: torch.Tensor, absorbed: torch.Tensor) -> None:
        """Computes absorbed queries [T, heads, rank] of q [T, heads, nope]."""
        self.per_head(q, self.w_uk, absorbed)
        if self.adapters is not None:
            self.adapters.add_to_queries(q, absorbed)

    def _values(self, attended: torch.Tensor, out: torch.Tensor) -> None:
        """Computes the heads' outputs [T, heads, v] of attended latents [T, heads, rank]."""
        self.per_head(attended, self.w_uv, out)
        if self.adapters is not None:
            self.adapters.add_to_outputs(attended, out)

    def _take_up(self, weight: torch.Tensor) -> None:
        """Sets views W_UK and W_UV of weight [heads * (nope + v), rank], so that it is stored once."""
        by_head = weight.unflatten(0, (self.num_heads, -1))
        self.w_uk = by_head[:, : self.spec.nope_dim]  # [heads, nope, rank]
        self.w_uv = by_head[:, self.spec.nope_dim :].transpose(1, 2)  # [heads, rank, v]


class OutputGate:
    """The sigmoid gate of each head of the output. Its projection has fewer rows than a block of scales: every rank
    holds all of it in the model's dtype, even if the checkpoint quantizes it, and computes the gates of its heads."""

    def __init__(self, scope: Scope, spec: HeadGate, site: Site, heads: ShardRange) -> None:
        assert not spec.softplus
        self.heads = heads
        shard = WeightShard("", whole(heads.total), whole(site.model.hidden_size))
        scope.quant.create_unpacked(scope.sub("head_gate"), shard, self._take)
        self.linear, self.multiply = scope.plan.entry(LINEAR), scope.plan.entry(ATTENTION_HEAD_GATE)

    def _take(self, weight: torch.Tensor) -> None:
        rows = weight[self.heads.run]
        missing = self.heads.padded_count - self.heads.count
        self.weight = F.pad(rows, (0, 0, 0, missing)) if missing else rows

    def __call__(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Returns out [T, heads * D] with each head times its gate, made of x [T, H]."""
        return self.multiply(out, self.linear(x, self.weight, None))


class ElementOutputGate:
    """The sigmoid gate of each element of the output, whose projection is sharded by head."""

    def __init__(self, scope: Scope, spec: MLA, site: Site, heads: ShardRange) -> None:
        self.linear = ColumnParallelLinear(
            scope.sub("gate"), spec.input_size or site.model.hidden_size, {"": heads.scale_dims(spec.v_dim)}
        )
        self.multiply = scope.plan.entry(ATTENTION_OUTPUT_GATE)

    def __call__(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Returns out [T, heads * D] times its gates, made of x [T, H]."""
        return self.multiply(out, self.linear(x))


def output_gate(scope: Scope, spec: MLA, site: Site, heads: ShardRange) -> OutputGate | ElementOutputGate:
    """Builds what gates the heads' outputs."""
    if isinstance(spec.gate, ElementGate):
        return ElementOutputGate(scope, spec, site, heads)
    assert spec.gate is not None
    return OutputGate(scope, spec.gate, site, heads)
