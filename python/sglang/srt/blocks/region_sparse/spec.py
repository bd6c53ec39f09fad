"""Grouped-query attention over regions of tokens, of which each KV head selects its own by pooled keys (Step-5), as a
mixer of `layer_spec`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.blocks.pooled_selection.spec import PooledSelection
from sglang.srt.configs.rope import RopeSpec
from sglang.srt.kernels.spec import Need
from sglang.srt.plan.block_defaults import HeadDims
from sglang.srt.plan.cache_spec import CacheSpec
from sglang.srt.plan.layer_spec import ParallelConfig, uneven_sizes
from sglang.srt.plan.weight_spec import Elements, Matrix, Weights


@dataclass(frozen=True, slots=True)
class RegionSparse(PooledSelection[GQA]):
    """Grouped-query attention over selected runs of tokens, here called regions.

    The indexer's key of a closed region is, channel by channel, the mean of its tokens' keys, weighted by a softmax
    over gates that hidden states make; then it is normed and rotated (`index_rope`) at the region's first position.
    Each KV head has `indexer.num_heads` index heads of its own; its score of a region is their weighted sum of ReLUs,
    and it attends to the regions with the highest scores and to the one that is still open.
    """

    index_rope: RopeSpec

    @property
    def rope(self) -> RopeSpec:
        return self.heads.rope

    @property
    def further_ropes(self) -> tuple[RopeSpec, ...]:
        return (self.index_rope,)

    @property
    def block_budget(self) -> int:
        return self.budget

    @property
    def kv_heads(self) -> int:
        return self.heads.num_kv_heads

    @property
    def caches_four_bits(self) -> bool:
        return False

    @property
    def cache_scale_bytes(self) -> int:
        return self.heads.cache_scale_bytes

    def unselected(self) -> GQA:
        return self.heads

    def scaled_head_dims(self, tp_size: int) -> Iterator[HeadDims]:
        return self.heads.scaled_head_dims(tp_size)

    def selected_slots(self, tp_size: int) -> int:
        return self.shares(tp_size).padded_kv_heads * (self.indexer.top_k + 1)

    def token_scores(self, context_len: int, tp_size: int) -> int:
        return self.shares(tp_size).padded_kv_heads * -(-context_len // self.block)

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]:
        of_heads = {need.op: need for need in self.heads.needs(parallel)}
        dense = of_heads.pop("decode_attention")
        del of_heads["extend_attention"]
        yield from of_heads.values()
        index, wide = self.indexer, parallel.unquantized
        index_dims = (index.head_dim, index.head_dim)
        yield Need("index_norm_rope", q_dtype=parallel.dtype, heads=(index.num_heads, 1))
        yield wide.need("kv_compressor", index_dims, uneven_sizes(self.block, index.head_dim))
        yield wide.need("index_key_store", index_dims)
        yield Need("index_queries", q_dtype=parallel.dtype)
        yield wide.need("sparse_indexer", index_dims, heads=(index.num_heads, 1))
        shares = self.shares(parallel.attn_tp_size)
        heads = (shares.padded_heads, shares.padded_kv_heads)
        yield replace(dense, op="block_attention", heads=heads, traits=uneven_sizes(self.block))

    def caches(self, parallel: ParallelConfig) -> tuple[CacheSpec, ...]:
        """Returns the caches of keys and values, of one key for each region, in 16 bits, and of the keys and gates of a
        request's last tokens."""
        return (*self.heads.caches(parallel), *self.index_caches(parallel.unquantized))

    def weights(self, hidden_size: int, tp_size: int) -> Weights:
        index, kv_heads = self.indexer, self.shares(tp_size).padded_kv_heads
        rows, dim = kv_heads * index.num_heads, index.head_dim
        return (
            *self.heads.weights(hidden_size, tp_size),
            Matrix(
                "attn.index",
                ("q", "k", "z"),
                (rows + 2) * dim,
                hidden_size,
                quantized=False,
                adapted=False,
                part_rows=(rows * dim, dim, dim),
            ),
            Matrix("attn.index_weights", ("",), rows, hidden_size, quantized=False, dtype="float32", adapted=False),
            Elements(3 * dim, "float32"),
        )

    def activation_elements(self, tp_size: int) -> int:
        """Returns the elements of attention, and of the indexer: its queries twice, keys and gates in both types, and
        the regions that are selected (32 bits each)."""
        kv_heads = self.shares(tp_size).padded_kv_heads
        index = (2 * kv_heads * self.indexer.num_heads + 10) * self.indexer.head_dim
        return self.heads.activation_elements(tp_size) + index + 4 * kv_heads * (self.indexer.top_k + 1)
