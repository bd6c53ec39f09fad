"""The lightning indexer of sparse latent attention: a few small heads score every visible token.

Each token stores one index key in a separate cache. The score of a cached token is the sum over the indexer's heads of
weight * relu(query . key), with head weights computed from the hidden state. Attention reads the tokens with the
largest scores. Every rank computes all heads, so that all select the same.

Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.blocks.mla.spec import Indexer
from sglang.srt.layers.block import Site
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.ops import INDEX_KEY_STORE, INDEX_NORM_ROPE, INDEX_QUERIES, LINEAR, SPARSE_INDEXER
from sglang.srt.layers.parameter import Init, Scope

if TYPE_CHECKING:
    from sglang.srt.layers.attention.sparse_rows import SparseRows
    from sglang.srt.layers.forward_batch import ForwardBatch


class LightningIndexer:
    """Stores the index keys of a step's tokens, and puts the selection for its sparse tokens into `SparseRows`."""

    def __init__(self, scope: Scope, spec: Indexer, site: Site) -> None:
        self.spec = spec
        self.q = ReplicatedLinear(scope.sub("index_q"))
        self.k = ReplicatedLinear(scope.sub("index_k"))
        head_weights = scope.sub("index_weights")
        matrix = head_weights.matrix()
        self.head_weight = head_weights.param("weight", (matrix.rows, matrix.cols), dtype=torch.float32)
        norm = scope.sub("index_norm")
        self.norm_weight = norm.param("weight", (spec.head_dim,), init=Init.ONES, dtype=torch.float32)
        self.norm_bias = norm.param("bias", (spec.head_dim,), init=Init.ZEROS, dtype=torch.float32)
        self.cache = scope.cache(site.layer_id, "index")
        self.scale = (spec.head_dim * spec.num_heads) ** -0.5
        self.linear = scope.plan.entry(LINEAR)
        self.norm_rope = scope.plan.entry(INDEX_NORM_ROPE)
        self.store = scope.plan.entry(INDEX_KEY_STORE)
        self.queries = scope.plan.entry(INDEX_QUERIES)
        self.select = scope.plan.entry(SPARSE_INDEXER)

    def __call__(
        self,
        x: torch.Tensor,
        q_latent: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        batch: ForwardBatch,
        rows: SparseRows | None,
    ) -> None:
        """Stores the keys of all T tokens, and selects for those in `rows`, if any. x [T, H]; q_latent [T, q_rank]: the
        normalized query latent of attention; rotation: of attention's RoPE part, from `RotaryTable.at`."""
        cache, selecting = self.cache, rows if rows is not None and rows.selects else None
        q = None
        if selecting is not None:
            q = self.q(q_latent[selecting.tokens]).unflatten(-1, (self.spec.num_heads, self.spec.head_dim))
        keys = self.norm_rope(
            self.k(x),
            q,
            0 if selecting is None else selecting.first,
            *rotation,
            self.norm_weight,
            self.norm_bias,
            self.spec.key_eps,
            self.spec.is_neox_style,
            self.spec.first_rotary(rotation[1].shape[1]),
        )
        scales = cache["scale"] if cache.quantized else None
        self.store(keys, cache.k, scales, batch.slots_of(cache).out_cache_loc)
        if selecting is None or q is None:
            return
        weights = self.linear(x[selecting.tokens], self.head_weight, None, torch.float32)
        queries, folded = self.queries(q, weights, self.scale, cache.k.dtype)
        selecting.selection = self.select(queries, folded, cache.k, scales, selecting.entries, self.spec.top_k)
