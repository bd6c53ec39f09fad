"""DeepSeek-V4.1's attention: a few layers make entries that later layers read, too; as a mixer of `layer_spec`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from sglang.srt.blocks.compressed.spec import CompressedSparse
from sglang.srt.kernels.spec import Need
from sglang.srt.plan.cache_spec import PER_REQUEST, CacheSpec, CacheTensor
from sglang.srt.plan.latent_record import entry_cache
from sglang.srt.plan.layer_spec import ParallelConfig, uneven_sizes
from sglang.srt.plan.weight_spec import Elements, Matrix, Weights


@dataclass(frozen=True, slots=True)
class CandidateBlocks:
    """The `top` runs of `block` entries with the highest best entry; later indexers select only among their entries.
    The run of the token itself is always one of them."""

    top: int
    block: int

    @property
    def entries(self) -> int:
        return self.top * self.block


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSparse(CompressedSparse):
    """Attention over a window and over entries of `rate` tokens each (1: one a token) that the layer `source` made.

    An entry is made of its own tokens alone. A layer with an `indexer` selects entries for itself and for the layers
    behind it, by keys that the layer `source` made of its entries; other layers take the selection of the layer
    `chosen_by`. With `candidates` the layer `bounded_by` selects runs of entries, within which the indexers of later
    layers select.
    """

    layer: int
    source: int
    chosen_by: int
    top_k: int
    """Most entries that a token attends to, whichever layer selected them."""
    candidates: CandidateBlocks | None = None
    bounded_by: int = -1
    run: int = 1
    """Number of entries, starting at a multiple of it, that are contiguous in memory."""

    @property
    def makes(self) -> bool:
        """Returns whether the layer makes entries."""
        return self.layer == self.source

    @property
    def shares_entries(self) -> bool:
        return True

    @property
    def follows_layer(self) -> bool:
        return not self.makes

    @property
    def unselected_rate(self) -> int:
        return 0

    @property
    def most_entries(self) -> int:
        return self.top_k

    def scored_entries(self, entries: int) -> int:
        bounded = self.candidates is not None and self.layer != self.bounded_by
        return min(entries, self.candidates.entries) if self.candidates is not None and bounded else entries

    @property
    def overlap(self) -> int:
        return 1

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]:
        yield from CompressedSparse.needs(replace(self, rate=0, indexer=None), parallel)
        dims = (self.head_dim, self.head_dim)
        if self.makes:
            index_dim = self.indexer.head_dim if self.indexer is not None else self.head_dim
            uneven = uneven_sizes(self.rate, self.head_dim, index_dim, self.rope_dim)
            yield parallel.unquantized.need("kv_compressor", dims, uneven)
        if self.indexer is not None:
            index_dims, heads = (self.indexer.head_dim, self.indexer.head_dim), (self.indexer.num_heads, 1)
            yield from self.indexer.pooled_needs(parallel)
            if self.candidates is not None:
                yield parallel.of_index_keys.need("candidate_blocks", index_dims, heads=heads)

    def caches(self, parallel: ParallelConfig) -> tuple[CacheSpec, ...]:
        caches = CompressedSparse.caches(replace(self, rate=0, indexer=None), parallel)
        if not self.makes or self.indexer is None:
            return caches
        rate, dim, dtype = Fraction(1, self.rate), self.head_dim, parallel.kv_dtype
        neighbours = self.rate * self.run
        entries = entry_cache("compressed", dim, dtype, self.record(dtype), rate)
        keys = self.indexer.cache(parallel.of_index_keys, rate)
        caches += (replace(entries, neighbours=neighbours), replace(keys, neighbours=neighbours))
        if self.rate > 1:
            rows = CacheTensor("rows", (self.rate, 2, dim), "float32")
            caches += (CacheSpec("pending", (rows,), lifetime=PER_REQUEST),)
        return caches

    def weights(self, hidden_size: int, tp_size: int) -> Weights:
        parts = list(CompressedSparse.weights(replace(self, rate=0, indexer=None), hidden_size, tp_size))
        if self.indexer is None:
            return tuple(parts)
        dim, index_heads = self.indexer.head_dim, self.indexer.num_heads
        parts.append(Matrix("attn.index_q", ("",), index_heads * dim, self.q_lora_rank))
        parts.append(Matrix("attn.index_weights", ("",), index_heads, hidden_size, quantized=False, adapted=False))
        if self.makes:
            names = ("wkv", "wgate") if self.rate > 1 else ("wkv",)
            parts.append(
                Matrix(
                    "attn.compressor", names, len(names) * self.head_dim, hidden_size, quantized=False, adapted=False
                )
            )
            parts.append(Matrix("attn.index_k", ("",), dim, self.head_dim, quantized=False, adapted=False))
            parts.append(Elements(self.head_dim + dim))
        return tuple(parts)

    def activation_elements(self, tp_size: int) -> int:
        """Returns the activation elements, and the slots of candidates (32 bits each)."""
        slots = 2 * self.candidates.top if self.candidates is not None and self.indexer is not None else 0
        return CompressedSparse.activation_elements(self, tp_size) + 2 * self.head_dim + slots
