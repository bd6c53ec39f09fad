"""Sparse attention over blocks of tokens that an indexer selects by pooled keys (Qwen3.8's QSA).

A request's tokens form blocks by position. The indexer stores one key per full block: the mean of its tokens' keys,
normalized and rotated at the block's first position. The score of a block is the sum over heads of ReLU(query . key);
attention reads the blocks with the largest scores, and the tokens after the last full one.

The columns of the indexer's heads are reordered: rotary columns last, with rotating pairs adjacent, as the kernels of
compressed entries need them. Products of queries and keys are unaffected.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from sglang.srt.blocks.compressed.compressor import EntryNorm, EntryStore
from sglang.srt.blocks.compressed.reference import TAIL_ROTATION
from sglang.srt.blocks.gqa.layer import GQAttention
from sglang.srt.blocks.pooled_sparse.block_selection import BlockSelection
from sglang.srt.blocks.pooled_sparse.reference import SELECTED_BLOCK_ATTENTION
from sglang.srt.blocks.pooled_sparse.spec import PooledSparse
from sglang.srt.layers.block import Site
from sglang.srt.layers.compressed_step import compressed_step
from sglang.srt.layers.ops import INDEX_QUERIES, LINEAR, RMSNORM, SPARSE_INDEXER
from sglang.srt.layers.packed_entries import key_scales, packed_keys
from sglang.srt.layers.parameter import Init, Scope, TensorPart, WeightShard
from sglang.srt.layers.quantization.activations import Activations, values_of
from sglang.srt.plan.ranks import whole
from sglang.srt.plan.weight_names import PartKey

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch


class PooledSparseAttention(GQAttention):
    """Block-sparse attention, [T, H] -> [T, H]."""

    def __init__(self, scope: Scope, spec: PooledSparse, site: Site) -> None:
        super().__init__(scope, spec.heads, site)
        self.row_format = None  # the indexer's product takes 16 bits
        self.scale = spec.heads.softmax_scale
        self.pooled_indexer = PooledIndexer(scope, spec, site)
        self.attend = scope.plan.entry(SELECTED_BLOCK_ATTENTION)

    def __call__(self, x: Activations, batch: ForwardBatch) -> torch.Tensor:
        q, _, _, gates = self._stored(x, batch)
        selection = self.pooled_indexer(values_of(x), batch)
        out = torch.empty_like(q)
        cache = self.cache
        self.attend(q, cache.k, cache.v, selection, out, scale=self.scale, k_scale=cache.k_scale, v_scale=cache.v_scale)
        out = out.flatten(1)
        return self.out(out if self.output_gate is None else self.output_gate(out, gates))


def pairs_last(head_dim: int, rotary_dim: int) -> torch.Tensor:
    """Returns the column order [head_dim] that moves the first `rotary_dim` columns, which rotate in pairs half of them
    apart, to the end with pairs adjacent. Example: (6, 4) -> 4, 5, 0, 2, 1, 3."""
    half = rotary_dim // 2
    pairs = torch.arange(rotary_dim).view(2, half).T.flatten()
    return torch.cat((torch.arange(rotary_dim, head_dim), pairs))


class PooledIndexer:
    """Selects the blocks that each token attends to from hidden states [T, H]. Every rank computes all heads, so that
    all select the same."""

    def __init__(self, scope: Scope, spec: PooledSparse, site: Site) -> None:
        assert spec.rope is not None
        index, hidden_size = spec.indexer, site.model.hidden_size
        self.spec, self.dim, self.num_heads = index, index.head_dim, index.num_heads
        self.block, self.eps = spec.block, site.model.norm_eps
        self.order = pairs_last(self.dim, spec.heads.rotary_dim)
        rows = (self.num_heads + 1) * self.dim
        scope.quant.create_unpacked(
            scope.sub("index_qk"), WeightShard("", whole(rows), whole(hidden_size)), self._take_projection
        )
        self.q_norm, self.k_norm = (self._norm(scope.sub(name)) for name in ("index_q_norm", "index_k_norm"))
        self.cache = scope.cache(site.layer_id, "index")
        packing, pending = packed_keys(scope.plan, self.dim), scope.cache(site.layer_id, "index_pending")
        self.store = EntryStore(scope.plan, self.cache, pending, packing)
        self.rotary = site.rotary.of(spec.rope)
        self.linear = scope.plan.entry(LINEAR)
        self.norm = scope.plan.entry(RMSNORM)
        self.rotate = scope.plan.entry(TAIL_ROTATION)
        self.prepare = scope.plan.entry(INDEX_QUERIES) if packing is not None else None
        self.select = scope.plan.entry(SPARSE_INDEXER)
        scope.finish.append(self._order_rows)

    def _norm(self, scope: Scope) -> torch.Tensor:
        part = TensorPart((self.dim,), convert=lambda stored: (stored.float() + 1.0)[self.order.to(stored.device)])
        return scope.param("weight", (self.dim,), {PartKey(): part}, Init.ONES, torch.float32)

    def _take_projection(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def _order_rows(self) -> None:
        """Reorders the rows of each head in place."""
        order = self.order.to(self.weight.device)
        self.weight.copy_(self.weight.unflatten(0, (-1, self.dim))[:, order].flatten(0, 1))

    def __call__(self, x: torch.Tensor, batch: ForwardBatch) -> BlockSelection:
        step, keys = compressed_step(batch), self.cache
        positions, cos_sin = self.rotary.at(batch.rotary_positions)
        products = self.linear(x, self.weight)
        self._keep_keys(products[:, self.num_heads * self.dim :], batch)
        q = self.norm(products[:, : self.num_heads * self.dim].unflatten(1, (-1, self.dim)), self.q_norm, self.eps)
        self.rotate(q, positions, cos_sin)
        scores = torch.full((len(q), self.num_heads), self.dim**-0.5, dtype=torch.float32, device=q.device)
        if self.prepare is not None:
            q, scores = self.prepare(q, scores, 1.0, keys.k.dtype)
        run = 1 if batch.extend is None else max(batch.extend.new_lens_cpu)
        rows = replace(step.entries(batch, keys, self.block), run=run)
        chosen = self.select(q, scores, keys.k, key_scales(keys), rows, self.spec.top_k)
        tails, tail_counts = step.tails(batch, keys, self.block)
        return BlockSelection(chosen.slots, chosen.counts, tails, tail_counts, self.block)

    def _keep_keys(self, keys: torch.Tensor, batch: ForwardBatch) -> None:
        """Stores the mean of keys [T, D] for each block that they complete. Keys of unfinished blocks are kept for
        later steps together with their angles, because with images a later step could not derive these from the block
        number."""
        step = compressed_step(batch)
        rows = step.rows_with_angles(batch, self.rotary, self.dim).clone()
        rows[:, 0] = keys
        norm = EntryNorm(self.k_norm, self.eps, None, self.rotary.spec.rot_dim)
        self.store(rows, None, norm, batch, step)
