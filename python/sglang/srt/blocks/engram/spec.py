"""DeepSeek-V4.1's Engram: embeddings of n-grams of normalized token texts, gated into the residual streams, as a block
of `layer_spec`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sglang.srt.blocks.ngram_embedding.spec import LAYER_SEEDS, NgramEmbedding
from sglang.srt.kernels.spec import Need
from sglang.srt.plan.cache_spec import PER_REQUEST, CacheSpec, CacheTensor
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.ranks import RankLayout
from sglang.srt.plan.weight_spec import Elements, Matrix, Weights

if TYPE_CHECKING:
    from typing import Self

SCALE_GROUP = 32
"""Columns of a row of the table that share a scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engram(NgramEmbedding):
    """An NgramEmbedding without a convolution: the streams take the gated value.

        num_texts: number of different token texts after normalizing case, accents and spaces (`utils.token_texts`),
            whose ids are hashed
        pad_token: stands for tokens before a request's first one
        layer: number of the layer, which seeds the hash
        image_token: image tokens add nothing to the streams, and n-grams do not cross them (`pad_token` stands for them
            and for earlier tokens); None: images are not served

    A table in e4m3 has an e8m0 scale for every SCALE_GROUP columns.
    """

    layer: int
    num_texts: int
    pad_token: int
    image_token: int | None = None

    def with_image_token(self, token: int) -> Self:
        return replace(self, image_token=token)

    @property
    def multipliers(self) -> tuple[int, ...]:
        """Odd factors of an n-gram's text ids in the hash, the last token first: pseudo-random numbers seeded by the
        layer's number."""
        import numpy as np  # not at the top, because commands that plan nothing should not load it

        bound = max(1, int(np.iinfo(np.int64).max) // self.num_texts // 2)
        drawn = np.random.default_rng(LAYER_SEEDS * self.layer).integers(0, bound, size=self.longest, dtype=np.int64)
        return tuple(2 * int(number) + 1 for number in drawn)

    @property
    def scale_columns(self) -> int:
        return self.dim // SCALE_GROUP if self.table_dtype else 0

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]:
        yield Need("ngram_embedding", q_dtype=parallel.dtype, kv_dtype=self.table_dtype or parallel.dtype)

    def caches(self, parallel: ParallelConfig) -> tuple[CacheSpec, ...]:
        """Returns the state of a request: the text ids of its last tokens."""
        ids = CacheTensor("ids", (self.longest - 1,), "int32")
        return (CacheSpec("ngrams", (ids,), lifetime=PER_REQUEST),)

    def weights(self, hidden_size: int, ranks: RankLayout, expert_rows: int) -> Weights:
        wide = self.streams * hidden_size
        table = Elements(0 if self.on_host else self.table_elements(ranks.attn_tp_size), self.table_dtype or None)
        return (
            Matrix("ngrams.project", ("",), wide + hidden_size, self.width),
            Elements(3 * wide, "float32"),
            Elements(self.vocab_size, "int64"),
            table,
        )

    def table_elements(self, tp_size: int) -> int:
        """Returns the elements of a rank's part of the table, with the scales, of a byte each."""
        return self.rank_rows(tp_size) * (self.dim + self.scale_columns)
