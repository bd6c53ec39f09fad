"""The indexer of block-sparse attention: which blocks of neighbouring tokens each KV head attends to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from sglang.srt.kernels.spec import Need
from sglang.srt.plan.layer_spec import CacheSpec, CacheTensor, Elements, Matrix, ParallelConfig, Weights, uneven_sizes

LEAST_BLOCK = 16
"""Tokens of the smallest block that a matrix unit scores at once."""


@dataclass(frozen=True, slots=True)
class BlockIndexer:
    """Chooses for each KV head `top_blocks` blocks of `block` tokens, the query's own and `local_blocks` - 1 before it
    always among them (MiniMax-M3).

    A token leaves one key of `head_dim`; each KV head has a query of its own. The score of a block is the largest
    product of the query and a key in it. Queries and keys have a norm a head and rotate as attention's do.
    """

    head_dim: int
    block: int
    top_blocks: int
    local_blocks: int = 1

    @property
    def top_k(self) -> int:
        """Number of tokens up to which requests attend to all of them."""
        return self.block * self.top_blocks

    def needs(self, parallel: ParallelConfig, kv_heads: int, rotary_dim: int) -> Iterator[Need]:
        dims, wide = (self.head_dim, self.head_dim), self._with_key_dtype(parallel)
        uneven = uneven_sizes(self.block, self.head_dim) if self.block >= LEAST_BLOCK else ("uneven_sizes",)
        yield wide.need("qk_norm_rope_store", dims, ["head_norm"], (kv_heads, 1), rotary_dim)
        yield wide.need("block_indexer", dims, uneven, (kv_heads, 1))

    def _with_key_dtype(self, parallel: ParallelConfig) -> ParallelConfig:
        """Returns the choices with the type of index keys: the model's, whatever the type of keys and values is."""
        return replace(parallel, kv_dtype=parallel.dtype)

    def cache(self, parallel: ParallelConfig) -> CacheSpec:
        """Returns the cache of the tokens' keys, which every rank holds."""
        keys = CacheTensor("k", (1, self.head_dim), self._with_key_dtype(parallel).kv_dtype)
        return CacheSpec("index", (keys,), neighbours=self.block)

    def weights(self, hidden_size: int, kv_heads: int) -> Weights:
        parts = ("index_q_proj", "index_k_proj")
        return (
            Matrix("attn.index", parts, (kv_heads + 1) * self.head_dim, hidden_size),
            Elements(2 * self.head_dim, "float32"),
        )
