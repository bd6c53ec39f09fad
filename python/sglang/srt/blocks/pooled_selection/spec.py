"""The common part of attention to selected runs of tokens, whatever its heads: an indexer with one pooled key for each
run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Generic, TypeVar

from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.blocks.mla.spec import MLA, Indexer
from sglang.srt.plan.block_defaults import HeadDims, MixerDefaults
from sglang.srt.plan.cache_spec import PER_REQUEST, CacheSpec, CacheTensor
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.ranks import HeadShares

Heads = TypeVar("Heads", GQA, MLA)


@dataclass(frozen=True, slots=True)
class PooledSelection(MixerDefaults, Generic[Heads]):
    """Attention (`heads`) over the `indexer.top_k` runs of `block` tokens that the indexer scores highest, and always
    over the tokens behind the last complete run.

    Runs start at multiples of `block` positions; pages hold whole runs.
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
        """Most tokens in the selected runs."""
        return self.indexer.top_k * self.block

    def shares(self, tp_size: int) -> HeadShares:
        return self.heads.shares(tp_size)

    def scaled_head_dims(self, tp_size: int) -> Iterator[HeadDims]:
        return self.heads.head_dims()

    @property
    def merges_tokens(self) -> bool:
        return True

    @property
    def short_prefill_graphs(self) -> bool:
        return True

    def index_caches(self, parallel: ParallelConfig) -> tuple[CacheSpec, CacheSpec]:
        """Returns two caches: one key for each run, and two vectors for each of a request's last tokens, of which the
        next run's key will be made."""
        rows = CacheTensor("rows", (self.block, 2, self.indexer.head_dim), "float32")
        pending = CacheSpec("index_pending", (rows,), lifetime=PER_REQUEST)
        return self.indexer.cache(parallel.of_index_keys, Fraction(1, self.block)), pending
