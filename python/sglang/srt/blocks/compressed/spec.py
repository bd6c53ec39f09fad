"""DeepSeek-V4's attention: the last tokens in a window, everything before it in compressed entries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from sglang.srt.blocks.mla.spec import Indexer
from sglang.srt.configs.rope import RopeSpec
from sglang.srt.kernels.spec import Need
from sglang.srt.plan.block_defaults import MixerDefaults
from sglang.srt.plan.cache_spec import PER_REQUEST, CacheSpec, CacheTensor, Window
from sglang.srt.plan.latent_record import LatentRecord, entry_cache, latent_record
from sglang.srt.plan.layer_spec import ParallelConfig, uneven_sizes
from sglang.srt.plan.weight_spec import Elements, Matrix, Weights


@dataclass(frozen=True, slots=True)
class CompressedSparse(MixerDefaults):
    """Attention in which one latent of `head_dim` a token is key and value of every head. It sees the last `window`
    tokens and, with `rate` > 0, one compressed entry for every `rate` tokens: those that the indexer selects, or all
    without one.

    Entries of layers with an indexer overlap: each is made of the last 2 * rate tokens. The output is projected in
    `o_groups` groups of heads, to `o_lora_rank` dims each. `block` > 1: that many rows of a request see each other and
    the last `window` tokens before them (block drafts).
    """

    num_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    window: int
    rope: RopeSpec | None = None  # its base differs between layers that compress and those that do not
    rate: int = 0
    indexer: Indexer | None = None
    block: int = 1
    head_norm: bool = True  # each query head is normed, without a weight

    @property
    def value_dim(self) -> int:
        return self.head_dim

    def record(self, kv_dtype: str) -> LatentRecord | None:
        """Returns how latents and entries are stored in a cache of this dtype; None: as they are."""
        return latent_record(kv_dtype, self.head_dim - self.rope_dim, self.rope_dim)

    @property
    def merges_tokens(self) -> bool:
        return True

    @property
    def short_prefill_graphs(self) -> bool:
        return True

    @property
    def unselected_rate(self) -> int:
        return self.rate if self.indexer is None else 0

    def uneven_part(self, tp_size: int) -> str:
        return f"{self.o_groups} groups of attention's output" if self.o_groups % tp_size else ""

    def in_blocks(self, size: int, causal: bool = False) -> CompressedSparse:
        assert not causal, "no such drafts are known"
        return replace(self, block=size)

    @property
    def makes(self) -> bool:
        """Returns whether the layer makes entries."""
        return self.rate > 0

    @property
    def most_entries(self) -> int:
        """Most entries that a token attends to; 0: all."""
        return 0 if self.indexer is None else self.indexer.top_k

    def scored_entries(self, entries: int) -> int:
        """Returns how many of a request's entries the indexer scores for a token."""
        return entries

    @property
    def overlap(self) -> int:
        """Number of runs of `rate` tokens of which an entry is made."""
        return 2 if self.indexer is not None else 1

    @property
    def group_dim(self) -> int:
        """Elements of all heads of one group of the output."""
        return self.num_heads * self.head_dim // self.o_groups

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]:
        dims, heads = (self.head_dim, self.head_dim), (self.num_heads // parallel.attn_tp_size, 1)
        uneven = uneven_sizes(self.head_dim, self.rope_dim)
        wide = parallel.unquantized
        yield wide.need("shared_kv_norm_rope_store", dims, uneven, heads, self.rope_dim)
        if self.rate:
            index_dim = self.indexer.head_dim if self.indexer is not None else self.head_dim
            yield wide.need("kv_compressor", dims, uneven_sizes(self.rate, self.head_dim, index_dim, self.rope_dim))
        if self.indexer is not None:
            yield from self.indexer.pooled_needs(parallel)
        yield parallel.need("sparse_attention", dims, ["shared_kv", "sinks"], heads)
        if self.record(parallel.kv_dtype) is not None:
            yield parallel.need("latent_record_store", dims)
        yield Need("tail_rotation", q_dtype=parallel.dtype, traits=uneven_sizes(self.rope_dim))
        yield Need("latent_absorb", q_dtype=parallel.dtype, heads=heads)

    def caches(self, parallel: ParallelConfig) -> tuple[CacheSpec, ...]:
        dim, dtype, record = self.head_dim, parallel.kv_dtype, self.record(parallel.kv_dtype)
        # Each row of a block sees `window` tokens before the block, one more than a row that is itself in its window.
        window = entry_cache("kv", dim, dtype, record, lifetime=Window(self.window + (self.block > 1)))
        if not self.rate:
            return (window,)
        rate = Fraction(1, self.rate)
        caches = [window, entry_cache("compressed", dim, dtype, record, rate), self._pending("pending", dim)]
        if self.indexer is not None:
            keys = self.indexer.cache(parallel.of_index_keys, rate)
            caches += (keys, self._pending("index_pending", self.indexer.head_dim))
        return tuple(caches)

    def _pending(self, name: str, dim: int) -> CacheSpec:
        """Returns the cache of the last tokens' values and gates, of which the next entry will be made."""
        rows = CacheTensor("rows", (self.overlap * self.rate, 2, self.overlap * dim), "float32")
        return CacheSpec(name, (rows,), lifetime=PER_REQUEST)

    def weights(self, hidden_size: int, tp_size: int) -> Weights:
        heads, groups = self.num_heads // tp_size, self.o_groups // tp_size
        low = groups * self.o_lora_rank
        parts: list[Matrix | Elements] = [
            Matrix("attn.q_a", ("",), self.q_lora_rank, hidden_size),
            Matrix("attn.q_b", ("",), heads * self.head_dim, self.q_lora_rank),
            Matrix("attn.kv", ("",), self.head_dim, hidden_size),
            Elements(
                low * self.group_dim
            ),  # the output's first product, held in the model's dtype because it is computed group by group
            Matrix("attn.o_b", ("",), hidden_size, low),
            Elements(self.q_lora_rank + self.head_dim),
            Elements(heads, "float32"),  # sinks
        ]
        if self.rate:
            parts += self._compressor(hidden_size, "attn.compressor", self.head_dim)
        if self.indexer is not None:
            dim, index_heads = self.indexer.head_dim, self.indexer.num_heads
            parts += self._compressor(hidden_size, "attn.index_compressor", dim)
            parts.append(Matrix("attn.index_q", ("",), index_heads * dim, self.q_lora_rank))
            parts.append(Matrix("attn.index_weights", ("",), index_heads, hidden_size, quantized=False, adapted=False))
        return tuple(parts)

    def _compressor(self, hidden_size: int, name: str, dim: int) -> tuple[Matrix | Elements, ...]:
        width = self.overlap * dim
        return (
            Matrix(name, ("wkv", "wgate"), 2 * width, hidden_size, quantized=False, adapted=False),
            Elements(self.rate * width, "float32"),  # a bias for each place in a run
            Elements(dim),
        )

    def activation_elements(self, tp_size: int) -> int:
        return 3 * self.num_heads // tp_size * self.head_dim + self.q_lora_rank + 4 * self.overlap * self.head_dim
