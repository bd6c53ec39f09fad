"""What attention to selected runs of tokens needs, whatever its heads: an indexer with one pooled key a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Generic, TypeVar

from sglang.srt.plan.layer_spec import PER_REQUEST, CacheSpec, CacheTensor, ParallelConfig
from sglang.srt.plan.mixers import GQA, MLA, HeadDims, Indexer
from sglang.srt.plan.ranks import HeadShares

Heads = TypeVar("Heads", GQA, MLA)


@dataclass(frozen=True, slots=True)
class PooledSelection(Generic[Heads]):
    """Attention (`heads`) over the `indexer.top_k` runs of `block` tokens that the indexer scores highest, and over the
    tokens behind the last whole run, always.

    Runs are those of positions: 0 to block - 1, and so on; pages hold whole runs.
    """

    heads: Heads
    indexer: Indexer
    block: int

    @property
    def num_heads(self) -> int:
        return self.heads.num_heads

    @property
    def value_dim(self) -> int:
        return self.heads.value_dim

    @property
    def budget(self) -> int:
        """Tokens in the runs that are selected at most."""
        return self.indexer.top_k * self.block

    def shares(self, tp_size: int) -> HeadShares:
        return self.heads.shares(tp_size)

    def head_dims(self) -> Iterator[HeadDims]:
        return self.heads.head_dims()

    def attention_shape(self, tp_size: int) -> None:
        """Returns None: what a token sees is chosen token by token, so no backend plans it for a step."""
        return None

    def index_caches(self, parallel: ParallelConfig) -> tuple[CacheSpec, CacheSpec]:
        """Returns the caches of one key a run, and of what a request's last tokens give to the next run's key: two
        vectors a token."""
        rows = CacheTensor("rows", (self.block, 2, self.indexer.head_dim), "float32")
        pending = CacheSpec("index_pending", (rows,), lifetime=PER_REQUEST)
        return self.indexer.cache(parallel, Fraction(1, self.block)), pending
