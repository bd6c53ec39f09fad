"""The indexer of block-sparse attention: one small head per KV head scores blocks of neighbouring tokens.

Each token stores one index key, in a cache with the same pages as its keys and values. A block's score is the largest
product of the query with a key in it; each KV head attends to the blocks with the largest scores, always including the
query's own block. A rank scores for its own KV heads. Source: MiniMax-M3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.blocks.block_selection.reference import BLOCK_INDEXER
from sglang.srt.blocks.block_selection.spec import BlockIndexer
from sglang.srt.blocks.gqa.reference import QK_NORM_ROPE_STORE
from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.layers.block import Site
from sglang.srt.layers.layernorm import norm_weight
from sglang.srt.layers.linear import ColumnParallelLinear
from sglang.srt.layers.parameter import Scope
from sglang.srt.layers.quantization.activations import Activations
from sglang.srt.plan.ranks import whole

if TYPE_CHECKING:
    from sglang.srt.layers.attention.sparse_rows import SparseRows
    from sglang.srt.layers.forward_batch import ForwardBatch


class BlockSelector:
    """Stores the index keys of a step's tokens, and puts the selection for its sparse tokens into `SparseRows`."""

    def __init__(self, scope: Scope, spec: GQA, site: Site) -> None:
        assert isinstance(spec.indexer, BlockIndexer)
        self.spec = spec.indexer
        dim, group = self.spec.head_dim, scope.groups.attention
        shares = spec.shares(group.size)
        self.num_heads = shares.padded_kv_heads
        weights = scope.sub("index")
        projections = {"index_q_proj": shares.kv_heads(group.rank).scale_dims(dim), "index_k_proj": whole(dim)}
        self.qk = ColumnParallelLinear(weights, weights.matrix(), projections)
        zero_centred = site.model.zero_centred_norms
        self.q_norm = norm_weight(scope.sub("index_q_norm"), dim, zero_centred)
        self.k_norm = norm_weight(scope.sub("index_k_norm"), dim, zero_centred)
        self.eps, self.rotary = site.model.norm_eps, site.rotary.of(spec.rope)
        self.cache = scope.cache(site.layer_id, "index")
        self.norm_rope_store = scope.plan.entry(QK_NORM_ROPE_STORE)
        self.select = scope.plan.entry(BLOCK_INDEXER)

    def __call__(self, x: Activations, batch: ForwardBatch, rows: SparseRows | None) -> None:
        """Stores the keys of all T tokens of x [T, H], and selects blocks for those in `rows`, if any."""
        spec, cache = self.spec, self.cache
        positions, cos_sin = self.rotary.at(batch.rotary_positions)
        q, _, _ = self.norm_rope_store(
            qkv=self.qk(x),
            positions=positions,
            cos_sin=cos_sin,
            q_weight=self.q_norm,
            k_weight=self.k_norm,
            eps=self.eps,
            num_heads=self.num_heads,
            num_kv_heads=1,
            head_dim=spec.head_dim,
            k_cache=cache.k,
            v_cache=None,
            out_cache_loc=batch.slots_of(cache).out_cache_loc,
        )
        if rows is not None:
            assert rows.blocks is not None
            q = q[rows.tokens]
            rows.selection = self.select(q, cache.k, rows.entries, rows.blocks, spec.top_blocks, spec.local_blocks)
