"""Attention over blocks of tokens that an indexer selects by pooled keys (Qwen3.8's QSA), as a mixer of
`layer_spec`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.blocks.pooled_selection.spec import PooledSelection
from sglang.srt.configs.rope import RopeSpec
from sglang.srt.kernels.spec import Need
from sglang.srt.plan.cache_spec import CacheSpec
from sglang.srt.plan.layer_spec import ParallelConfig, uneven_sizes
from sglang.srt.plan.weight_spec import Elements, Weights


@dataclass(frozen=True, slots=True)
class PooledSparse(PooledSelection[GQA]):
    """Grouped-query attention over selected runs of tokens, here called blocks.

    The indexer's key of a block is the mean of its tokens' keys, normed, then rotated at the position of the block's
    first token. Its score is an unweighted sum of ReLUs over the index heads.
    """

    @property
    def rope(self) -> RopeSpec | None:
        return self.heads.rope

    @property
    def block_budget(self) -> int:
        return self.budget

    def unselected(self) -> GQA:
        return self.heads

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]:
        of_heads = {need.op: need for need in self.heads.needs(parallel)}
        dense = of_heads.pop("decode_attention")
        del of_heads["extend_attention"]
        yield from of_heads.values()
        index, rotary = self.indexer, self.heads.rotary_dim
        index_dims = (index.head_dim, index.head_dim)
        uneven = uneven_sizes(self.block, index.head_dim, rotary)
        yield parallel.unquantized.need("kv_compressor", index_dims, uneven)
        yield Need("tail_rotation", q_dtype=parallel.dtype, traits=uneven_sizes(rotary))
        yield from index.pooled_needs(parallel, weighted=False)
        shares = self.shares(parallel.attn_tp_size)
        heads = (shares.padded_heads, shares.padded_kv_heads)
        yield replace(dense, op="selected_block_attention", heads=heads, traits=uneven_sizes(self.block))

    def caches(self, parallel: ParallelConfig) -> tuple[CacheSpec, ...]:
        """Returns the caches of keys and values, of one key for each block, and of the keys of a request's last
        tokens."""
        return (*self.heads.caches(parallel), *self.index_caches(parallel))

    @property
    def caches_four_bits(self) -> bool:
        return False

    @property
    def cache_scale_bytes(self) -> int:
        return self.heads.cache_scale_bytes

    def weights(self, hidden_size: int, tp_size: int) -> Weights:
        dim = self.indexer.head_dim
        return (
            *self.heads.weights(hidden_size, tp_size),
            # The indexer's projections have the model's dtype, and rows in another order than in the checkpoint.
            Elements((self.indexer.num_heads + 1) * dim * hidden_size),
            Elements(2 * dim, "float32"),
        )

    def activation_elements(self, tp_size: int) -> int:
        index = (self.indexer.num_heads + 5) * self.indexer.head_dim
        return self.heads.activation_elements(tp_size) + index + 2 * self.indexer.top_k
