"""The indexer of sparse grouped-query attention, which selects tokens for all heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from sglang.srt.blocks.mla.spec import Indexer
from sglang.srt.kernels.spec import Need
from sglang.srt.plan.block_defaults import HeadDims
from sglang.srt.plan.cache_spec import CacheSpec
from sglang.srt.plan.kv_spec import KV_DTYPE_BYTES
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.weight_spec import Elements, Matrix, Weights


@dataclass(frozen=True, slots=True)
class TokenIndexer:
    """The lightning indexer (`mla.spec.Indexer`) in front of grouped-query attention: its queries are made of the
    hidden state, and the keys and values that it selects are whole heads (Naive-N0.5).

    To attention a token is a block of its own.
    """

    scores: Indexer
    of_each_head: ClassVar[bool] = False

    @property
    def block(self) -> int:
        return 1

    @property
    def top_k(self) -> int:
        return self.scores.top_k

    @property
    def chosen(self) -> str:
        """What is selected, for people."""
        return f"{self.top_k:,} tokens for all heads"

    def selected_slots(self, kv_heads: int) -> int:
        """Returns the slots of a token's selection, which is that of all heads."""
        return self.top_k

    def token_scores(self, context_len: int, kv_heads: int) -> int:
        """Returns the scores of a token at the end of the context."""
        return context_len

    def activation_elements(self, kv_heads: int) -> int:
        """Returns the elements of queries and of the key of a token, before and after their rotation."""
        return 2 * (self.scores.num_heads + 1) * self.scores.head_dim

    def head_dims(self) -> Iterator[HeadDims]:
        """Yields nothing: every rank has all of the indexer's heads."""
        yield from ()

    def needs(self, parallel: ParallelConfig, kv_heads: int, rotary_dim: int) -> Iterator[Need]:
        yield Need("index_norm_rope", q_dtype=parallel.dtype, heads=(self.scores.num_heads, 1))
        yield from self.scores.needs(self._with_index_dtype(parallel))

    def cache(self, parallel: ParallelConfig) -> CacheSpec:
        """Returns the cache of index keys, which every rank holds whole."""
        return self.scores.cache(self._with_index_dtype(parallel))

    def _with_index_dtype(self, parallel: ParallelConfig) -> ParallelConfig:
        """Returns the config with the dtype of index keys: e4m3 with a scale for each, as the model rounds them,
        whatever keys and values have; the model's dtype where that is fp32."""
        return replace(parallel, kv_dtype="fp8_e4m3" if KV_DTYPE_BYTES[parallel.dtype] == 2 else parallel.dtype)

    def weights(self, hidden_size: int, kv_heads: int) -> Weights:
        dim, heads = self.scores.head_dim, self.scores.num_heads
        return (
            Matrix("attn.index_q", ("",), heads * dim, hidden_size),
            Matrix("attn.index_k", ("",), dim, hidden_size),
            Matrix("attn.index_weights", ("",), heads, hidden_size, quantized=False, dtype="float32", adapted=False),
            Elements(2 * dim, "float32"),
        )
