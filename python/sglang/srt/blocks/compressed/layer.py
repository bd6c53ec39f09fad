"""DeepSeek-V4's compressed attention.

One vector per token is key and value of all heads. A query sees the tokens of a sliding window and, in layers that
compress, entries that stand for runs of earlier tokens: all of them, or those that an indexer with heads and entries of
its own selected. All are in one softmax, with a sink (a logit per head without a value). Since values carry RoPE, it is
reversed in the output, whose heads are then projected group by group and mixed.

Heads and groups are sharded over ranks; entries, indexer and compressors are complete on each. Source: DeepSeek-V4's
report, section 2.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.blocks.compressed.compressor import Compressor
from sglang.srt.blocks.compressed.reference import SHARED_KV_NORM_ROPE_STORE, TAIL_ROTATION
from sglang.srt.blocks.compressed.spec import CompressedSparse
from sglang.srt.blocks.mla.reference import LATENT_ABSORB
from sglang.srt.blocks.mla.spec import Indexer
from sglang.srt.layers.attention.selection import EntryRows, Selection
from sglang.srt.layers.block import Site, SumsInOutput
from sglang.srt.layers.compressed_step import CompressedStep, compressed_step
from sglang.srt.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from sglang.srt.layers.ops import INDEX_QUERIES, LINEAR, RMSNORM, SPARSE_ATTENTION, SPARSE_INDEXER
from sglang.srt.layers.packed_entries import key_scales, packed_keys, packed_records, rows_to_pack, token_numbers
from sglang.srt.layers.parameter import Init, Scope, WeightShard, share_param
from sglang.srt.plan.ranks import padded_share, whole

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch


class CompressedAttention(SumsInOutput):
    """Compressed attention, [T, H] -> [T, H]."""

    def __init__(self, scope: Scope, spec: CompressedSparse, site: Site) -> None:
        assert spec.rope is not None
        self.spec, self.eps = spec, site.model.norm_eps
        group, hidden_size = scope.groups.attention, site.model.hidden_size
        self.num_heads = spec.num_heads // group.size
        heads = padded_share(spec.num_heads, self.num_heads, group.rank)
        self.q_a = ReplicatedLinear(scope.sub("q_a"))
        self.q_norm = scope.sub("q_norm").param("weight", (spec.q_lora_rank,), init=Init.ONES)
        self.q_b = ColumnParallelLinear(scope.sub("q_b"), spec.q_lora_rank, {"": heads.scale_dims(spec.head_dim)})
        self.kv = ReplicatedLinear(scope.sub("kv"))
        self.kv_norm = scope.sub("kv_norm").param("weight", (spec.head_dim,), init=Init.ONES)
        self.sinks = share_param(scope, "attn_sink", heads, Init.ZEROS, torch.float32)
        self.groups = spec.o_groups // group.size
        low = padded_share(spec.o_groups, self.groups, group.rank).scale_dims(spec.o_lora_rank)
        shard = WeightShard("", low, whole(spec.group_dim))
        scope.quant.create_unpacked(scope.sub("o_a"), shard, self._take_groups)
        self.out = RowParallelLinear(scope.sub("o_b"), low, hidden_size, group=group)
        self.window = scope.cache(site.layer_id, "kv")
        self.packing = packed_records(scope.plan, spec.record(scope.plan.kv_cache_dtype))
        self.record = None if self.packing is None else self.packing.record
        self.rotary = site.rotary.of(spec.rope)
        self.compressor: Compressor | None = None
        self.indexer: CompressedIndexer | None = None
        if spec.rate and type(spec) is CompressedSparse:
            cache = scope.cache(site.layer_id, "compressed")
            state = scope.cache(site.layer_id, "pending")
            self.compressor = Compressor(
                scope.sub("compressor"), spec, spec.head_dim, self.eps, cache, state, self.packing
            )
        if spec.indexer is not None and type(spec) is CompressedSparse:
            self.indexer = CompressedIndexer(scope, spec, spec.indexer, site)
        self.norm = scope.plan.entry(RMSNORM)
        self.store = scope.plan.entry(SHARED_KV_NORM_ROPE_STORE)
        self.rotate = scope.plan.entry(TAIL_ROTATION)
        self.by_group = scope.plan.entry(LATENT_ABSORB)
        self.attend = scope.plan.entry(SPARSE_ATTENTION)

    def _take_groups(self, weight: torch.Tensor) -> None:
        """Sets `o_a`, a view [groups, dims, rank] of weight [groups * rank, dims of a group's heads]."""
        self.o_a = weight.unflatten(0, (self.groups, -1)).transpose(1, 2)

    def __call__(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        spec, step = self.spec, compressed_step(batch)
        positions, cos_sin = self.rotary.at(batch.positions)
        latent = self.norm(self.q_a(x), self.q_norm, self.eps)
        q = self._stored(self.q_b(latent).unflatten(-1, (self.num_heads, spec.head_dim)), x, batch)
        sources = [(self.window.k, self._in_window(batch, step)), *self._entries(x, latent, batch, step, cos_sin)]
        out = torch.empty_like(q)
        self.attend(q, sources, out, scale=spec.head_dim**-0.5, sinks=self.sinks, record=self.record)
        self.rotate(out, positions, cos_sin, inverse=True)
        low = out.new_empty((len(out), self.groups, spec.o_lora_rank))
        self.by_group(out.view(len(out), self.groups, spec.group_dim), self.o_a, low)
        return self.out(low.flatten(1))

    def _stored(self, q: torch.Tensor, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Stores the key-value vectors of x [T, H] in the window cache, and returns q [T, heads, D] normalized and
        rotated."""
        positions, cos_sin = self.rotary.at(batch.positions)
        loc = batch.slots_of(self.window).out_cache_loc
        heads = q if self.spec.head_norm else q[:, :0]  # the op norms the heads that it rotates
        into, at = self.window.k, loc
        if self.packing is not None:
            into, at = rows_to_pack(self.packing, len(x), x.device), token_numbers(batch)
        self.store(heads, self.kv(x), positions, cos_sin, self.kv_norm, self.eps, into, at)
        if self.packing is not None:
            self.packing(into, self.window, loc)
        if not self.spec.head_norm and q.shape[1]:
            self.rotate(q, positions, cos_sin)
        return q

    def _in_window(self, batch: ForwardBatch, step: CompressedStep) -> Selection:
        return step.window(batch, self.window, self.spec.window)

    def _entries(
        self, x: torch.Tensor, latent: torch.Tensor, batch: ForwardBatch, step: CompressedStep, cos_sin: torch.Tensor
    ) -> list[tuple[torch.Tensor, Selection]]:
        """Stores the entries of runs that the new tokens complete; returns the cache with the selected entries, if
        any."""
        if self.compressor is None:
            return []
        self.compressor(x, batch, step, cos_sin)
        return [(self.compressor.cache.k, self._selected(x, latent, batch, step, cos_sin))]

    def _selected(
        self, x: torch.Tensor, latent: torch.Tensor, batch: ForwardBatch, step: CompressedStep, cos_sin: torch.Tensor
    ) -> Selection:
        if self.indexer is not None:
            return self.indexer(x, latent, batch, step, cos_sin)
        assert self.compressor is not None
        return step.all(batch, self.compressor.cache, self.spec.rate)


class BlockWindowAttention(CompressedAttention):
    """Compressed attention of a block draft, whose rows come in blocks of one request each (`CompressedSparse.block`),
    [R * B, H] -> [R * B, H]."""

    def __init__(self, scope: Scope, spec: CompressedSparse, site: Site) -> None:
        assert not spec.rate
        super().__init__(scope, spec, site)

    def keep(self, x: torch.Tensor, batch: ForwardBatch) -> None:
        """Stores the key-value vectors of x [T, H] at the batch's tokens."""
        self._stored(x.new_empty((len(x), 0, self.spec.head_dim)), x, batch)

    def _in_window(self, batch: ForwardBatch, step: CompressedStep) -> Selection:
        assert batch.decode is not None
        size, rows = self.spec.block, batch.decode
        slots, ends = rows.req_pool_indices, rows.seq_lens
        first = batch.positions.view(-1, size)[:, 0].to(torch.int32) - self.spec.window
        table = batch.slots_of(self.window).req_to_token
        entries = EntryRows(table, slots, ends, table.shape[1])
        seen = entries.since(first.clamp(min=0), self.spec.window + size)
        return Selection(seen.slots.repeat_interleave(size, 0), seen.counts.repeat_interleave(size, 0))


class CompressedIndexer:
    """Selects compressed entries by smaller index entries of the same runs: hidden states [T, H] and query latents [T,
    R] -> the slots of each token's best entries."""

    def __init__(self, scope: Scope, spec: CompressedSparse, indexer: Indexer, site: Site) -> None:
        self.spec, self.indexer = spec, indexer
        dim, num_heads = indexer.head_dim, indexer.num_heads
        self.queries = ReplicatedLinear(scope.sub("index_q"))
        self.weights = scope.sub("index_weights").param("weight", (num_heads, site.model.hidden_size))
        cache = scope.cache(site.layer_id, "index")
        state = scope.cache(site.layer_id, "index_pending")
        packing = packed_keys(scope.plan, dim)
        self.compressor = Compressor(
            scope.sub("index_compressor"), spec, dim, site.model.norm_eps, cache, state, packing
        )
        self.linear = scope.plan.entry(LINEAR)
        self.rotate = scope.plan.entry(TAIL_ROTATION)
        self.prepare = scope.plan.entry(INDEX_QUERIES)
        self.select = scope.plan.entry(SPARSE_INDEXER)
        self.scale = (dim * num_heads) ** -0.5

    def __call__(
        self, x: torch.Tensor, latent: torch.Tensor, batch: ForwardBatch, step: CompressedStep, cos_sin: torch.Tensor
    ) -> Selection:
        keys = self.compressor.cache
        self.compressor(x, batch, step, cos_sin)
        q = self.queries(latent).unflatten(-1, (self.indexer.num_heads, self.indexer.head_dim))
        self.rotate(q, batch.positions, cos_sin)
        weights = self.linear(x, self.weights, None, torch.float32)
        q, weights = self.prepare(q, weights, self.scale, keys.k.dtype)
        rows = step.entries(batch, keys, self.spec.rate)
        return self.select(q, weights, keys.k, key_scales(keys), rows, self.indexer.top_k)
