"""The indexer of block-sparse attention, which selects blocks of contiguous tokens for each KV head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from sglang.srt.kernels.spec import Need
from sglang.srt.plan.block_defaults import HeadDims
from sglang.srt.plan.cache_spec import CacheSpec, CacheTensor
from sglang.srt.plan.layer_spec import ParallelConfig, uneven_sizes
from sglang.srt.plan.weight_spec import Elements, Matrix, Weights

MIN_BLOCK = 16
"""Tokens of the smallest block that matrix instructions score at once."""


@dataclass(frozen=True, slots=True)
class BlockIndexer:
    """Selects `top_blocks` blocks of `block` tokens for each KV head, always with the query's own block and the
    `local_blocks` - 1 before it (MiniMax-M3).

    Each token has one key of `head_dim`; each KV head has a query of its own. The score of a block is the largest
    product of the query with a key in it. Queries and keys are normed for each head and rotate as attention's do.
    """

    head_dim: int
    block: int
    top_blocks: int
    local_blocks: int = 1
    of_each_head: ClassVar[bool] = True

    @property
    def top_k(self) -> int:
        """Number of tokens in the selected blocks: shorter requests attend to all of their tokens."""
        return self.block * self.top_blocks

    @property
    def chosen(self) -> str:
        """What is selected, for people."""
        return f"{self.top_blocks} blocks of {self.block} tokens for each KV head"

    def selected_slots(self, kv_heads: int) -> int:
        """Returns the slots of a token's selection on a rank with so many KV heads."""
        return kv_heads * self.top_blocks

    def token_scores(self, context_len: int, kv_heads: int) -> int:
        """Returns the scores of a token at the end of the context on a rank with so many KV heads."""
        return kv_heads * -(-context_len // self.block)

    def activation_elements(self, kv_heads: int) -> int:
        """Returns the elements of queries and keys of a token, before and after their norm."""
        return 2 * (kv_heads + 1) * self.head_dim

    def head_dims(self) -> Iterator[HeadDims]:
        """Yields the rows that go with a head."""
        yield HeadDims("attn.index", ("index_q_proj",), 0, self.head_dim, of_kv=True)

    def needs(self, parallel: ParallelConfig, kv_heads: int, rotary_dim: int) -> Iterator[Need]:
        dims, wide = (self.head_dim, self.head_dim), self._with_key_dtype(parallel)
        uneven = uneven_sizes(self.block, self.head_dim) if self.block >= MIN_BLOCK else ("uneven_sizes",)
        yield wide.need("qk_norm_rope_store", dims, ["head_norm"], (kv_heads, 1), rotary_dim)
        yield wide.need("block_indexer", dims, uneven, (kv_heads, 1))

    def _with_key_dtype(self, parallel: ParallelConfig) -> ParallelConfig:
        """Returns the config with the dtype of index keys: the model's, whatever that of keys and values is."""
        return replace(parallel, kv_dtype=parallel.dtype)

    def cache(self, parallel: ParallelConfig) -> CacheSpec:
        """Returns the cache of index keys, which every rank holds whole."""
        keys = CacheTensor("k", (1, self.head_dim), self._with_key_dtype(parallel).kv_dtype)
        return CacheSpec("index", (keys,), neighbours=self.block)

    def weights(self, hidden_size: int, kv_heads: int) -> Weights:
        parts = ("index_q_proj", "index_k_proj")
        return (
            Matrix(
                "attn.index",
                parts,
                (kv_heads + 1) * self.head_dim,
                hidden_size,
                part_rows=(kv_heads * self.head_dim, self.head_dim),
            ),
            Elements(2 * self.head_dim, "float32"),
        )
