"""Embeddings of n-grams of token ids, looked up in a hashed table and gated into the residual streams, as a block of
`layer_spec` (Qwen3.8's PLE, "engram")."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.kernels.spec import Need
from sglang.srt.plan.block_defaults import FeedForwardDefaults
from sglang.srt.plan.cache_spec import PER_REQUEST, CacheSpec, CacheTensor
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.ranks import RankLayout
from sglang.srt.plan.weight_spec import Elements, Matrix, Weights

if TYPE_CHECKING:
    from typing import Self

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
LAYER_SEEDS = 10007
"""Distance between the seeds of a model's tables."""


def splitmix64(value: int) -> int:
    """Returns the 64-bit hash of Steele, Lea and Flood (OOPSLA 2014)."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def primes_from(start: int) -> Iterator[int]:
    """Yields the primes from `start` on, in order."""
    for number in itertools.count(max(2, start)):
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            yield number


@functools.cache
def _head_rows(base: int, before: int, count: int) -> tuple[int, ...]:
    return tuple(itertools.islice(primes_from(base), before, before + count))


@dataclass(frozen=True, slots=True)
class NgramEmbedding(FeedForwardDefaults):
    """An embedding of n-grams. A token looks up `heads` rows for each n-gram of 2 to `longest` tokens that ends with
    it, in a table of `dim` columns. The concatenated rows are projected to one value, and to a key for each of
    `streams` residual streams of `stream_size` elements; the streams gate the value. A convolution of `taps` taps,
    `longest` tokens apart, follows in each channel.

        number: of this table among the model's, from 0; it seeds the hash
        table_dtype: of the stored table: "fp8_e4m3" with one scale, or "" for the model's
        end_token: ends a segment; n-grams do not cross it
        parts: number of tensors into which checkpoints cut the table
        on_host: the table is in pinned host memory, from which the GPU reads the rows of a step

    Ranks divide the table by heads.
    """

    longest: int
    heads: int
    dim: int
    base_rows: int
    row_multiple: int
    number: int
    seed: int
    vocab_size: int
    end_token: int
    taps: int
    streams: int
    stream_size: int
    parts: int
    table_dtype: str
    on_host: bool = False

    @property
    def table(self) -> Self:
        return self

    @property
    def num_heads(self) -> int:
        return (self.longest - 1) * self.heads

    def uneven_part(self, tp_size: int) -> str:
        return f"{self.num_heads} rows of n-grams of a token" if self.num_heads % tp_size else ""

    @property
    def width(self) -> int:
        """Elements of a token's rows together."""
        return self.num_heads * self.dim

    @property
    def kept_tokens(self) -> int:
        """Number of earlier tokens that the convolution reads."""
        return (self.taps - 1) * self.longest

    @property
    def multipliers(self) -> tuple[int, ...]:
        """Odd factors of an n-gram's token ids in the hash, the last token first; no product reaches 2^63."""
        bound = max(1, ((1 << 63) - 1) // self.vocab_size // 2)
        base = self.seed + LAYER_SEEDS * self.number
        seeds = ((base + _GAMMA * (place + 1)) & _MASK for place in range(self.longest))
        return tuple(2 * (splitmix64(seed) % bound) + 1 for seed in seeds)

    @property
    def head_rows(self) -> tuple[int, ...]:
        """Rows of each head's part of the table: successive primes from `base_rows` on, different for every table."""
        return _head_rows(self.base_rows, self.number * self.num_heads, self.num_heads)

    @property
    def rows(self) -> int:
        """Rows of the whole table, with the padding at its end."""
        return -(-sum(self.head_rows) // self.row_multiple) * self.row_multiple

    def rank_rows(self, tp_size: int) -> int:
        """Returns the rows for which each rank has room."""
        each = self.num_heads // tp_size
        return max(sum(self.head_rows[first : first + each]) for first in range(0, self.num_heads, each))

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]:
        yield Need("ngram_embedding", q_dtype=parallel.dtype, kv_dtype=self.table_dtype or parallel.dtype)

    def caches(self, parallel: ParallelConfig) -> tuple[CacheSpec, ...]:
        """Returns the state of a request: the ids of its last tokens, and the convolution's inputs."""
        ids = CacheTensor("ids", (self.longest - 1,), "int32")
        rows = CacheTensor("rows", (self.kept_tokens, self.streams * self.stream_size), parallel.dtype)
        return (CacheSpec("ngrams", (ids, rows), lifetime=PER_REQUEST),)

    def weights(self, hidden_size: int, ranks: RankLayout, expert_rows: int) -> Weights:
        wide = self.streams * hidden_size
        table = Elements(0 if self.on_host else self.table_elements(ranks.attn_tp_size), self.table_dtype or None)
        return (
            Matrix("ngrams.project", ("key", "value"), wide + hidden_size, self.width),
            Elements(3 * wide, "float32"),
            Elements(self.taps * wide),
            Elements(self.longest + 2 * self.num_heads, "int64"),
            *([Elements(1, "float32")] if self.table_dtype else []),
            table,
        )

    def table_elements(self, tp_size: int) -> int:
        """Returns the elements of a rank's part of the table."""
        return self.rank_rows(tp_size) * self.dim

    def activation_elements(self, hidden_size: int, ranks: RankLayout) -> int:
        return 2 * self.width + (4 * self.streams + 1) * hidden_size
