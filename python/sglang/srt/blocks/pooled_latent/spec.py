"""Latent attention over runs of tokens that an indexer selects by pooled keys (GLM-5.3-Flash), as a mixer of
`layer_spec`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sglang.srt.blocks.mla.spec import MLA
from sglang.srt.blocks.pooled_selection.spec import PooledSelection
from sglang.srt.configs.rope import RopeSpec, unrotated
from sglang.srt.kernels.spec import Need
from sglang.srt.plan.cache_spec import CacheSpec
from sglang.srt.plan.latent_record import LatentRecord, entry_cache, latent_record
from sglang.srt.plan.layer_spec import ParallelConfig, uneven_sizes
from sglang.srt.plan.weight_spec import Elements, Matrix, Weights


@dataclass(frozen=True, slots=True)
class PooledLatent(PooledSelection[MLA]):
    """Latent attention without rotary dims over selected runs of tokens.

    The indexer's key of a run is a weighted sum of its tokens' normed keys. The weights are, channel by channel, a
    softmax over gates that hidden states make, plus a bias for each place in the run. Prompts are absorbed like decode.
    """

    @property
    def latent_heads(self) -> MLA:
        return self.heads

    @property
    def rope(self) -> RopeSpec:
        """A table without rotation, for kernels that norm and rotate keys."""
        return unrotated(self.indexer.head_dim // 2)

    @property
    def keeps_selection(self) -> bool:
        """Returns True: a run that draft tokens complete has no key before they are accepted."""
        return True

    def record(self, kv_dtype: str) -> LatentRecord | None:
        """Returns how latents are stored in a cache of this dtype; None: as they are."""
        return latent_record(kv_dtype, self.heads.kv_lora_rank, 0)

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]:
        index, rank, rotary = self.indexer, self.heads.kv_lora_rank, self.rope.rot_dim
        dims, heads = (rank, rank), (self.shares(parallel.attn_tp_size).padded_heads, 1)
        wide = parallel.unquantized
        yield wide.need("shared_kv_norm_rope_store", dims, uneven_sizes(rank, rotary), heads, rotary)
        yield Need("index_norm_rope", q_dtype=parallel.dtype, heads=(index.num_heads, 1))
        index_dims = (index.head_dim, index.head_dim)
        yield wide.need("kv_compressor", index_dims, uneven_sizes(self.block, index.head_dim))
        yield from index.pooled_needs(parallel)
        yield Need("latent_absorb", q_dtype=parallel.dtype, heads=heads)
        yield parallel.need("sparse_attention", dims, ["shared_kv"], heads)
        if self.record(parallel.kv_dtype) is not None:
            yield parallel.need("latent_record_store", dims)

    def caches(self, parallel: ParallelConfig) -> tuple[CacheSpec, ...]:
        """Returns the caches of latents, of one key for each run, and of the keys and gates of a request's last
        tokens."""
        record = self.record(parallel.kv_dtype)
        latent = entry_cache("latent", self.heads.kv_lora_rank, parallel.kv_dtype, record)
        return (latent, *self.index_caches(parallel))

    def weights(self, hidden_size: int, tp_size: int) -> Weights:
        dim, index_heads = self.indexer.head_dim, self.indexer.num_heads
        return (
            *self.heads.weights(hidden_size, tp_size),
            Matrix("attn.index_q", ("",), index_heads * dim, self.heads.q_lora_rank),
            Matrix("attn.index_k", ("",), dim, hidden_size),
            Matrix("attn.index_weights", ("",), index_heads, hidden_size, quantized=False, adapted=False),
            Matrix("attn.index_pool", ("",), dim, hidden_size, quantized=False, adapted=False),
            Elements((2 + self.block) * dim, "float32"),
        )

    def activation_elements(self, tp_size: int) -> int:
        """Returns the elements of queries in both forms, of the latents that attention returns and of outputs, and of
        the indexer and the slots that it selects (32 bits each)."""
        latent, heads = self.heads, self.shares(tp_size).padded_heads
        absorbed = heads * (2 * latent.kv_lora_rank + latent.qk_dim + latent.v_dim)
        index = (2 * self.indexer.num_heads + 8) * self.indexer.head_dim
        return absorbed + latent.kv_lora_rank + latent.q_lora_rank + index + 2 * (self.budget + self.indexer.top_k)
