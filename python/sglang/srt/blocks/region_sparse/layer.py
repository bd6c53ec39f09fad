"""Sparse attention over regions of tokens, of which each KV head selects its own by pooled keys (Step-5).

A request's tokens form regions by position. The indexer stores one key for each closed region. A KV head's index heads
score these keys as an indexer of its own would: to the kernel a token is as many rows as a rank has KV heads. The
region that is still open comes behind those that are selected, so that attention reads whole blocks, and of the last
one only the tokens up to the query.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from sglang.srt.blocks.compressed.reference import KV_COMPRESSOR_OP
from sglang.srt.blocks.gqa.layer import GQAttention
from sglang.srt.blocks.mla.spec import KEY_NORM_EPS
from sglang.srt.blocks.region_sparse.spec import RegionSparse
from sglang.srt.layers.attention.selection import EntryRows, Selection
from sglang.srt.layers.block import Site
from sglang.srt.layers.compressed_step import CompressedStep, TokenRequests, compressed_step
from sglang.srt.layers.kept_rows import keep_rows
from sglang.srt.layers.layernorm import norm_weight
from sglang.srt.layers.linear import ColumnParallelLinear
from sglang.srt.layers.ops import (
    BLOCK_ATTENTION,
    INDEX_KEY_STORE,
    INDEX_NORM_ROPE,
    INDEX_QUERIES,
    LINEAR,
    RMSNORM,
    SPARSE_INDEXER,
)
from sglang.srt.layers.parameter import Init, Scope, TensorPart
from sglang.srt.layers.quantization.activations import Activations, values_of
from sglang.srt.plan.ranks import ShardRange, whole
from sglang.srt.plan.weight_names import PartKey

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch


class RegionSparseAttention(GQAttention):
    """Region-sparse attention, [T, H] -> [T, H]."""

    def __init__(self, scope: Scope, spec: RegionSparse, site: Site) -> None:
        super().__init__(scope, spec.heads, site)
        self.row_format = None  # the indexer's product takes 16 bits
        self.scale, self.block = spec.heads.softmax_scale, spec.block
        self.region_indexer = RegionIndexer(scope, spec, site)
        self.attend = scope.plan.entry(BLOCK_ATTENTION)

    def __call__(self, x: Activations, batch: ForwardBatch) -> torch.Tensor:
        q, _, v, gates = self._stored(x, batch)
        selection, cache = self.region_indexer(values_of(x), batch), self.cache
        lens = compressed_step(batch).entries(batch, cache, 1).counts
        out = q.new_empty((*q.shape[:2], v.shape[2]))
        self.attend(
            q,
            cache.k,
            cache.v,
            selection,
            lens,
            self.block,
            out,
            scale=self.scale,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
        )
        heads = out.flatten(1)
        if self.output_gate is not None:
            heads = self.output_gate(heads, gates)
        if self.head_gate is not None:
            heads = self.gate_heads(heads, self.head_gate(values_of(x)))
        return self.out(heads)


class RegionIndexer:
    """Selects the regions that each token and KV head of this rank attends to, from hidden states [T, H]."""

    def __init__(self, scope: Scope, spec: RegionSparse, site: Site) -> None:
        index, hidden_size, group = spec.indexer, site.model.hidden_size, scope.groups.attention
        shares = spec.shares(group.size)
        kv_heads = shares.kv_heads(group.rank)
        dim, self.index = index.head_dim, index
        self.kv_heads, self.block, self.eps = shares.padded_kv_heads, spec.block, site.model.norm_eps
        self.sizes = (self.kv_heads * index.num_heads * dim, dim, dim)
        projections = {"q": kv_heads.scale_dims(index.num_heads * dim), "k": whole(dim), "z": whole(dim)}
        matrix = scope.sub("index")
        self.project = ColumnParallelLinear(matrix, matrix.matrix(), projections)
        self.head_weight = _head_weight(scope.sub("index_weights"), kv_heads.scale_dims(index.num_heads), hidden_size)
        self.q_norm = norm_weight(scope.sub("index_q_norm"), dim, site.model.zero_centred_norms)
        norm = scope.sub("index_k_norm")
        self.norm_weight = norm.param("weight", (dim,), init=Init.ONES, dtype=torch.float32)
        self.norm_bias = norm.param("bias", (dim,), init=Init.ZEROS, dtype=torch.float32)
        self.no_bias = torch.zeros((spec.block, dim), dtype=torch.float32, device=scope.device)
        self.cache = scope.cache(site.layer_id, "index")
        self.pending = scope.cache(site.layer_id, "index_pending")
        self.rotary = site.rotary.of(spec.index_rope)
        self.scale = (dim * index.num_heads) ** -0.5
        self.compressor = scope.plan.entry(KV_COMPRESSOR_OP)
        self.store = scope.plan.entry(INDEX_KEY_STORE)
        self.norm_rope = scope.plan.entry(INDEX_NORM_ROPE)
        self.prepare = scope.plan.entry(INDEX_QUERIES)
        self.select = scope.plan.entry(SPARSE_INDEXER)
        self.linear = scope.plan.entry(LINEAR)
        self.norm = scope.plan.entry(RMSNORM)

    def __call__(self, x: torch.Tensor, batch: ForwardBatch) -> Selection:
        """Returns the regions (slot / block) of each token and KV head, [T * heads] rows, the open one last."""
        step, dim = compressed_step(batch), self.index.head_dim
        q, k, z = self.project(x).split(self.sizes, dim=-1)
        self._keep_keys(k, z, batch, step)
        q = self.norm(q.unflatten(1, (-1, dim)), self.q_norm, self.eps)
        self.norm_rope(k, q, 0, *self.rotary.at(batch.positions), self.norm_weight, self.norm_bias, KEY_NORM_EPS, True)
        weights = self.linear(x, self.head_weight, None, torch.float32)
        q, folded = self.prepare(q, weights, self.scale, self.cache.k.dtype)
        rows = self._rows(batch, step)
        q = q.view(len(rows), self.index.num_heads, dim)
        chosen = self.select(q, folded.view(len(rows), -1), self.cache.k, None, rows, self.index.top_k)
        return self._with_open_regions(chosen, batch, step)

    def _keep_keys(self, k: torch.Tensor, z: torch.Tensor, batch: ForwardBatch, step: CompressedStep) -> None:
        """Stores the key of each region that the new tokens close, and keeps rows of open regions for later steps."""
        requests, rows = step.requests, torch.stack((k, z), dim=1).float()
        pooled = k.new_empty((len(k), 1, self.index.head_dim))
        at, slots = step.completed(batch, self.cache, self.block)
        self.compressor.compress(
            rows,
            self.no_bias,
            self.pending["rows"],
            requests.slots,
            requests.positions,
            requests.firsts,
            None,
            0.0,
            None,
            pooled,
            at,
            angles=0,
        )
        first = (batch.positions + (1 - self.block)).clamp(min=0)
        keys = self.norm_rope(
            pooled[:, 0], None, 0, *self.rotary.at(first), self.norm_weight, self.norm_bias, KEY_NORM_EPS, True
        )
        self.store(keys, self.cache.k, None, slots)
        keep_rows(batch, self._keep, requests, rows)

    def _keep(self, rows: torch.Tensor, requests: TokenRequests) -> None:
        """Keeps each request's last rows for later keys."""
        self.compressor.keep(rows, self.pending["rows"], requests.slots, requests.positions, requests.stops)

    def _rows(self, batch: ForwardBatch, step: CompressedStep) -> EntryRows:
        """Returns the closed regions that each token sees, a row for each KV head."""
        entries = step.entries(batch, self.cache, self.block)
        run = 1 if batch.extend is None else max(batch.extend.new_lens_cpu)
        return replace(
            entries,
            req_pool_indices=entries.req_pool_indices.repeat_interleave(self.kv_heads),
            counts=entries.counts.repeat_interleave(self.kv_heads),
            run=run * self.kv_heads,
        )

    def _with_open_regions(self, chosen: Selection, batch: ForwardBatch, step: CompressedStep) -> Selection:
        """Returns the selection with each token's open region, if there is one, behind those that are selected."""
        tails, tail_counts = (
            each.repeat_interleave(self.kv_heads) for each in step.tails(batch, self.cache, self.block)
        )
        slots = F.pad(chosen.slots, (0, 1)).scatter_(1, chosen.counts[:, None].long(), tails[:, None].to(torch.int32))
        return Selection(slots, chosen.counts + (tail_counts > 0).to(torch.int32))


def _head_weight(scope: Scope, heads: ShardRange, hidden_size: int) -> torch.Tensor:
    """Returns the weights [heads, H] fp32 of this rank's index heads, zero for padding heads."""
    part = TensorPart((heads.total, hidden_size), (heads.run, slice(None)), (slice(0, heads.count), slice(None)))
    tensor = scope.param("weight", (heads.padded_count, hidden_size), {PartKey(): part}, Init.NORMAL, torch.float32)
    if not tensor.is_meta:
        tensor[heads.count :].zero_()
    return tensor
