"""DeepSeek-V4.1's attention: compressed attention whose entries come from a few layers and are shared by later ones.

A layer that makes entries pools the tokens of a run, and computes an entry's index key from the entry itself before
RoPE. A layer with an indexer selects entries for itself and for the layers up to the next indexer. One of them also
selects runs of entries, to which later indexers are limited.

Sources: the inference code beside the checkpoint of V4.1-Flash, as others describe it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.blocks.compressed.compressor import EntryNorm, EntryStore
from sglang.srt.blocks.compressed.layer import CompressedAttention
from sglang.srt.blocks.compressed.reference import KV_COMPRESSOR_OP, TAIL_ROTATION
from sglang.srt.blocks.mla.spec import Indexer
from sglang.srt.blocks.shared_sparse.candidates import CANDIDATE_BLOCKS, choose_within
from sglang.srt.blocks.shared_sparse.spec import SharedSparse
from sglang.srt.layers.attention.selection import Selection
from sglang.srt.layers.block import Site
from sglang.srt.layers.compressed_step import CompressedStep
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.ops import INDEX_QUERIES, LINEAR, RMSNORM, SPARSE_INDEXER
from sglang.srt.layers.packed_entries import PackedRecords, Packing, key_scales, packed_keys, rows_to_pack
from sglang.srt.layers.parameter import Init, Scope, TensorPart
from sglang.srt.plan.weight_names import PartKey

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch import ForwardBatch
    from sglang.srt.mem_cache.memory_pool import CacheStore


class SharedSparseAttention(CompressedAttention):
    """Compressed attention over shared entries, [T, H] -> [T, H]."""

    def __init__(self, scope: Scope, spec: SharedSparse, site: Site) -> None:
        super().__init__(scope, spec, site)
        self.shared = spec
        self.cache = scope.cache(spec.source, "compressed")
        self.maker = EntryMaker(scope, spec, site, self.packing) if spec.makes else None
        self.chooser = None if spec.indexer is None else EntryChooser(scope, spec, spec.indexer, site)

    def _entries(
        self, x: torch.Tensor, latent: torch.Tensor, batch: ForwardBatch, step: CompressedStep, cos_sin: torch.Tensor
    ) -> list[tuple[torch.Tensor, Selection]]:
        if self.maker is not None:
            self.maker(x, batch, step, cos_sin)
        if self.chooser is not None:
            step.chosen[self.shared.layer] = self.chooser(x, latent, batch, step, cos_sin)
        return [(self.cache.k, step.chosen[self.shared.chosen_by])]


class EntryMaker:
    """Stores, from hidden states [T, H], the entries of runs that the tokens complete, and their index keys."""

    def __init__(self, scope: Scope, spec: SharedSparse, site: Site, packing: PackedRecords | None) -> None:
        assert spec.indexer is not None
        self.spec, self.eps, self.packing = spec, site.model.norm_eps, packing
        self.key_packing = packed_keys(scope.plan, spec.indexer.head_dim)
        dim, index_dim = spec.head_dim, spec.indexer.head_dim
        into = scope.sub("compressor")
        matrix = into.matrix()
        parts = {
            PartKey(name): TensorPart((dim, matrix.cols), dest=(slice(i * dim, (i + 1) * dim), slice(None)))
            for i, name in enumerate(matrix.parts)
        }
        self.weight = into.param("weight", (len(parts) * dim, matrix.cols), parts)
        self.norm_weight = into.sub("norm").param("weight", (dim,), init=Init.ONES)
        self.key_weight = scope.sub("index_k").param("weight", (index_dim, dim))
        self.key_norm = scope.sub("index_norm").param("weight", (index_dim,), init=Init.ONES)
        self.cache, self.keys = (scope.cache(site.layer_id, name) for name in ("compressed", "index"))
        self.store: EntryStore | None = None
        if spec.rate > 1:
            self.store = EntryStore(scope.plan, self.cache, scope.cache(site.layer_id, "pending"), packing)
        # Gates have no bias; with one entry per token there are neither gates nor unfinished runs.
        self.bias, self.no_bias, self.no_state = (
            torch.zeros(shape, dtype=torch.float32, device=scope.device)
            for shape in ((spec.rate, dim), (1, dim), (1, 1, 2, dim))
        )
        self.linear = scope.plan.entry(LINEAR)
        self.norm = scope.plan.entry(RMSNORM)
        self.kernels = scope.plan.entry(KV_COMPRESSOR_OP)

    def __call__(self, x: torch.Tensor, batch: ForwardBatch, step: CompressedStep, cos_sin: torch.Tensor) -> None:
        rate, requests = self.spec.rate, step.requests
        rows = self.linear(x, self.weight, None, torch.float32)
        norm = EntryNorm(self.norm_weight, self.eps, cos_sin)
        loc = batch.slots_of(self.cache).out_cache_loc
        if self.store is None:
            latents = rows.to(x.dtype)
            self._store_each(rows, norm, self.cache, self.packing, requests.positions, loc)
        else:
            rows = rows.unflatten(1, (2, -1))
            latents = self._pooled(rows, self.store.state["rows"], x, step)
            self.store(rows, self.bias, norm, batch, step)
            # A key has its entry's slot; those of tokens that complete no run go to the padding slot, or nowhere.
            nowhere = 0 if self.key_packing is None else -1
            loc = torch.where((requests.positions + 1) % rate == 0, loc // rate, nowhere)
        latents = self.norm(latents, self.norm_weight, self.eps)
        keys = self.linear(latents, self.key_weight, None, torch.float32)
        first = (requests.positions + 1 - rate).clamp(min=0)
        norm = EntryNorm(self.key_norm, self.eps, cos_sin)
        self._store_each(keys, norm, self.keys, self.key_packing, first, loc)

    def _pooled(self, rows: torch.Tensor, state: torch.Tensor, x: torch.Tensor, step: CompressedStep) -> torch.Tensor:
        """Returns the entry [T, D], before its norm, of the run that each token completes; zeros for other tokens. Must
        run before the rows are stored, which changes `state`."""
        requests, rate = step.requests, self.spec.rate
        pooled = torch.zeros((len(rows), 1, self.spec.head_dim), dtype=x.dtype, device=x.device)
        at = torch.arange(len(rows), device=x.device) * rate
        self.kernels.compress(
            rows, self.bias, state, requests.slots, requests.positions, requests.firsts, None, 0.0, None,
            pooled, at,
        )  # fmt: skip
        return pooled[:, 0]

    def _store_each(
        self,
        rows: torch.Tensor,
        norm: EntryNorm,
        cache: CacheStore,
        packing: Packing | None,
        positions: torch.Tensor,
        loc: torch.Tensor,
    ) -> None:
        """Stores rows [T, D] fp32, normalized and rotated by positions [T], at the slots loc [T]."""
        dim, none = rows.shape[1], torch.zeros_like(positions)
        values = torch.zeros((len(rows), 2, dim), dtype=torch.float32, device=rows.device)
        values[:, 0] = rows
        into, at = cache.k, loc
        if packing is not None:
            into, at = rows_to_pack(packing, len(rows), rows.device), torch.arange(len(rows), device=rows.device)
        self.kernels.compress(
            values, self.no_bias[:, :dim], self.no_state[..., :dim], none, positions, positions, norm.weight, norm.eps,
            norm.cos_sin, into, at,
        )  # fmt: skip
        if packing is not None:
            packing(into, cache, loc)


class EntryChooser:
    """Selects the slots of each token's best entries from hidden states [T, H] and query latents [T, R]."""

    def __init__(self, scope: Scope, spec: SharedSparse, indexer: Indexer, site: Site) -> None:
        self.spec, self.indexer = spec, indexer
        self.queries = ReplicatedLinear(scope.sub("index_q"))
        self.weights = scope.sub("index_weights").param("weight", (indexer.num_heads, site.model.hidden_size))
        self.keys = scope.cache(spec.source, "index")
        self.linear = scope.plan.entry(LINEAR)
        self.rotate = scope.plan.entry(TAIL_ROTATION)
        self.prepare = scope.plan.entry(INDEX_QUERIES)
        self.select = scope.plan.entry(SPARSE_INDEXER)
        self.scale = (indexer.head_dim * indexer.num_heads) ** -0.5
        self.choose_blocks = None if spec.candidates is None else scope.plan.entry(CANDIDATE_BLOCKS)

    def __call__(
        self, x: torch.Tensor, latent: torch.Tensor, batch: ForwardBatch, step: CompressedStep, cos_sin: torch.Tensor
    ) -> Selection:
        spec, keys, top_k, scales = self.spec, self.keys, self.indexer.top_k, key_scales(self.keys)
        q = self.queries(latent).unflatten(-1, (self.indexer.num_heads, self.indexer.head_dim))
        self.rotate(q, batch.positions, cos_sin)
        weights = self.linear(x, self.weights, None, torch.float32)
        q, weights = self.prepare(q, weights, self.scale, keys.k.dtype)
        rows, bounds = step.entries(batch, keys, spec.rate), spec.candidates
        if bounds is None or rows.max_count <= bounds.entries:  # no run would be left out
            return self.select(q, weights, keys.k, scales, rows, top_k)
        if spec.layer != spec.bounded_by:
            blocks = step.candidates[spec.bounded_by]
            return choose_within(self.select, q, weights, keys.k, scales, rows, blocks, bounds.block, top_k)
        assert self.choose_blocks is not None
        step.candidates[spec.layer] = self.choose_blocks(q, weights, keys.k, scales, rows, bounds.block, bounds.top)
        return self.select(q, weights, keys.k, scales, rows, top_k)
