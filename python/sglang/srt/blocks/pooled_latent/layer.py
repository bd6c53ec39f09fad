"""Sparse latent attention over runs of tokens that an indexer selects by pooled keys (GLM-5.3-Flash).

Each token stores a latent without a rotary part, which is key and value of all heads in absorbed attention. A request's
tokens form runs of fixed length by position; the indexer stores one key per full run. Scores are those of
DeepSeek-V3.2's indexer over these keys; attention reads the tokens of the runs with the largest scores, and those after
the last full run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.blocks.compressed.compressor import EntryStore
from sglang.srt.blocks.compressed.reference import SHARED_KV_NORM_ROPE_STORE
from sglang.srt.blocks.mla.heads import LatentHeads
from sglang.srt.blocks.mla.spec import KEY_NORM_EPS
from sglang.srt.blocks.pooled_latent.spec import PooledLatent
from sglang.srt.layers.attention.selection import Selection
from sglang.srt.layers.block import Site
from sglang.srt.layers.compressed_step import CompressedStep, compressed_step
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.ops import INDEX_NORM_ROPE, INDEX_QUERIES, LINEAR, RMSNORM, SPARSE_ATTENTION, SPARSE_INDEXER
from sglang.srt.layers.packed_entries import key_scales, packed_keys, packed_records, rows_to_pack, token_numbers
from sglang.srt.layers.parameter import Init, Scope

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Row of each token [T] in a table of cosines and sines, and the table; nothing rotates by it here."""


class PooledLatentAttention(LatentHeads):
    """Sparse latent attention, [T, H] -> [T, H]."""

    def __init__(self, scope: Scope, spec: PooledLatent, site: Site) -> None:
        super().__init__(scope, spec.heads, site)
        self.eps = site.model.norm_eps
        self.cache = scope.cache(site.layer_id, "latent")
        self.packing = packed_records(scope.plan, spec.record(scope.plan.kv_cache_dtype))
        self.record = None if self.packing is None else self.packing.record
        self.indexer = RunIndexer(scope, spec, site)
        self.rotary = site.rotary.of(spec.rope)
        self.norm = scope.plan.entry(RMSNORM)
        self.store = scope.plan.entry(SHARED_KV_NORM_ROPE_STORE)
        self.attend = scope.plan.entry(SPARSE_ATTENTION)

    def __call__(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        spec, rank = self.spec, self.spec.kv_lora_rank
        rotation = self.rotary.at(batch.positions)
        q, latent = self.qkv_a(x).split(self.qkv_sizes, dim=-1)
        self._store(latent, rotation, batch)
        q_latent = self.norm(q, self.q_norm, self.eps)
        sources = [(self.cache.k, selection) for selection in self.indexer(x, q_latent, rotation, batch)]
        q = self.q_b(q_latent).unflatten(-1, (self.num_heads, spec.qk_dim))
        absorbed = q.new_empty((len(x), self.num_heads, rank))
        self._absorb(q, absorbed)
        attended = torch.empty_like(absorbed)
        self.attend(absorbed, sources, attended, scale=spec.softmax_scale, record=self.record)
        out = q.new_empty((len(x), self.num_heads, spec.v_dim))
        self._values(attended, out)
        return self.out(out.flatten(1))

    def _store(self, latent: torch.Tensor, rotation: Rotation, batch: ForwardBatch) -> None:
        """Normalizes and stores the latents [T, rank] of the new tokens."""
        no_heads = latent.new_empty((len(latent), 0, latent.shape[1]))
        loc = batch.slots_of(self.cache).out_cache_loc
        into, at = self.cache.k, loc
        if self.packing is not None:
            into, at = rows_to_pack(self.packing, len(latent), latent.device), token_numbers(batch)
        self.store(no_heads, latent, *rotation, self.kv_norm, self.eps, into, at)
        if self.packing is not None:
            self.packing(into, self.cache, loc)


class RunIndexer:
    """Selects the tokens that each token attends to, from hidden states [T, H] and normalized query latents [T, R]:
    those of the selected runs, and those of the unfinished run. Every rank computes all heads, so that all select the
    same."""

    def __init__(self, scope: Scope, spec: PooledLatent, site: Site) -> None:
        index, hidden_size = spec.indexer, site.model.hidden_size
        self.spec, self.block, self.layer_id = index, spec.block, site.layer_id
        dim, num_heads = index.head_dim, index.num_heads
        self.q, self.k = (ReplicatedLinear(scope.sub(name)) for name in ("index_q", "index_k"))
        self.weights = scope.sub("index_weights").param("weight", (num_heads, hidden_size))
        pool = scope.sub("index_pool")
        self.gate = pool.param("index_kpool_compress_gate", (dim, hidden_size))
        bias_shape = (spec.block, dim)
        self.bias = pool.param("index_kpool_compress_ape", bias_shape, init=Init.ZEROS, dtype=torch.float32)
        norm = scope.sub("index_norm")
        self.norm_weight = norm.param("weight", (dim,), init=Init.ONES, dtype=torch.float32)
        self.norm_bias = norm.param("bias", (dim,), init=Init.ZEROS, dtype=torch.float32)
        self.cache = scope.cache(site.layer_id, "index")
        pending = scope.cache(site.layer_id, "index_pending")
        self.store = EntryStore(scope.plan, self.cache, pending, packed_keys(scope.plan, dim))
        self.scale = (dim * num_heads) ** -0.5
        self.places = torch.arange(spec.block, dtype=torch.int32, device=scope.device)
        self.linear = scope.plan.entry(LINEAR)
        self.norm = scope.plan.entry(INDEX_NORM_ROPE)
        self.prepare = scope.plan.entry(INDEX_QUERIES)
        self.select = scope.plan.entry(SPARSE_INDEXER)

    def __call__(
        self, x: torch.Tensor, q_latent: torch.Tensor, rotation: Rotation, batch: ForwardBatch
    ) -> tuple[Selection, Selection]:
        step, keys = compressed_step(batch), self.cache
        shared = batch.shared_selection
        if shared is not None and self.layer_id in shared:
            return shared.again(self.layer_id, step.entries(batch, keys, 1))
        self._keep_keys(x, rotation, batch, step)
        q = self.q(q_latent).unflatten(-1, (self.spec.num_heads, self.spec.head_dim))
        head_weights = self.linear(x, self.weights, None, torch.float32)
        q, folded = self.prepare(q, head_weights, self.scale, keys.k.dtype)
        entries = step.entries(batch, keys, self.block)
        chosen = self.select(q, folded, keys.k, key_scales(keys), entries, self.spec.top_k)
        tokens, tail = self._tokens(chosen), self._tail(batch, step)
        if shared is not None:
            begins = (batch.positions + 1) // self.block * self.block
            shared.keep(self.layer_id, tokens, begins, self.block - 1)
        return tokens, tail

    def _keep_keys(self, x: torch.Tensor, rotation: Rotation, batch: ForwardBatch, step: CompressedStep) -> None:
        """Stores the key of each run that the new tokens complete, and keeps rows of unfinished runs for later
        steps."""
        keys = self.norm(self.k(x), None, 0, *rotation, self.norm_weight, self.norm_bias, KEY_NORM_EPS)
        rows = torch.empty((len(x), 2, self.spec.head_dim), dtype=torch.float32, device=x.device)
        rows[:, 0] = keys
        rows[:, 1] = self.linear(x, self.gate, None, torch.float32)
        self.store(rows, self.bias, None, batch, step)

    def _tokens(self, chosen: Selection) -> Selection:
        """Returns the slots [T, K * block] of the tokens of runs [T, K]."""
        slots = (chosen.slots[:, :, None] * self.block + self.places).flatten(1)
        return Selection(slots, chosen.counts * self.block)

    def _tail(self, batch: ForwardBatch, step: CompressedStep) -> Selection:
        """Returns the tokens of the unfinished run up to the query, computed once per step for all layers."""
        name = f"run_tail.{self.block}"
        if name not in batch.step_cache:
            first, counts = step.tails(batch, self.cache, self.block)
            batch.step_cache[name] = first[:, None] * self.block + self.places[: self.block - 1]
            batch.step_cache[f"{name}.counts"] = counts
        return Selection(batch.step_cache[name], batch.step_cache[f"{name}.counts"])
