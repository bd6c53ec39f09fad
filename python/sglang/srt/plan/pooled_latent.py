"""Latent attention to runs of tokens that an indexer selects by pooled keys (GLM-5.3-Flash), as a mixer of
`layer_spec`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from sglang.srt.configs.rope import RopeSpec, unrotated
from sglang.srt.kernels.spec import Need
from sglang.srt.plan.kv_spec import refuse_fp4
from sglang.srt.plan.layer_spec import (
    PER_REQUEST,
    CacheSpec,
    CacheTensor,
    Elements,
    Matrix,
    Serving,
    Weights,
    latent_cache,
    uneven_sizes,
)
from sglang.srt.plan.mixers import MLA, HeadDims, Indexer
from sglang.srt.plan.ranks import HeadShares


@dataclass(frozen=True, slots=True)
class PooledLatent:
    """Latent attention without rotary dims (`latent`) over the `indexer.top_k` runs of `block` tokens that the indexer
    scores highest, and over the tokens behind the last whole run, always.

    The indexer's key of a run is the sum of its tokens' keys, each normed, with the softmax of gates that hidden states
    make, channel by channel, plus a bias for each place in a run. Runs are those of positions: 0 to block - 1, and so
    on; pages hold whole runs. Prompts are absorbed as decoding is.
    """

    latent: MLA
    indexer: Indexer
    block: int

    @property
    def num_heads(self) -> int:
        return self.latent.num_heads

    @property
    def value_dim(self) -> int:
        return self.latent.value_dim

    @property
    def rope(self) -> RopeSpec:
        """Nothing rotates; kernels that norm keys take the table of such."""
        return unrotated(self.indexer.head_dim // 2)

    @property
    def budget(self) -> int:
        """Tokens in the runs that are selected at most."""
        return self.indexer.top_k * self.block

    def shares(self, tp_size: int) -> HeadShares:
        return self.latent.shares(tp_size)

    def head_dims(self) -> Iterator[HeadDims]:
        return self.latent.head_dims()

    def needs(self, serving: Serving) -> Iterator[Need]:
        index, rank, rotary = self.indexer, self.latent.kv_lora_rank, self.rope.rot_dim
        dims, heads = (rank, rank), (self.shares(serving.attn_tp_size).padded_heads, 1)
        yield serving.need("shared_kv_norm_rope_store", dims, uneven_sizes(rank, rotary), heads, rotary)
        yield Need("index_norm_rope", q_dtype=serving.dtype, heads=(index.num_heads, 1))
        index_dims = (index.head_dim, index.head_dim)
        yield serving.need("kv_compressor", index_dims, uneven_sizes(self.block, index.head_dim))
        yield Need("index_queries", q_dtype=serving.dtype)
        yield serving.need("sparse_indexer", index_dims, heads=(index.num_heads, 1))
        yield Need("latent_absorb", q_dtype=serving.dtype, heads=heads)
        yield serving.need("sparse_attention", dims, ["shared_kv"], heads)

    def caches(self, serving: Serving) -> tuple[CacheSpec, ...]:
        """Returns the caches of latents, of one key a run, and of the keys and gates of a request's last tokens, of
        which the next run's is made."""
        refuse_fp4(serving.kv_dtype, "latents (MLA) are keys and values of all heads, and have 16 bits an element")
        rank, dim = self.latent.kv_lora_rank, self.indexer.head_dim
        rows = CacheTensor("rows", (self.block, 2, dim), "float32")
        pending = CacheSpec("index_pending", (rows,), lifetime=PER_REQUEST)
        latent = latent_cache("latent", rank, rank, serving.kv_dtype)
        return (latent, self.indexer.cache(serving, Fraction(1, self.block)), pending)

    def attention_shape(self, tp_size: int) -> None:
        """Returns None: what a token sees is chosen token by token, so no backend plans it for a step."""
        return None

    def weights(self, hidden_size: int, tp_size: int) -> Weights:
        dim, index_heads = self.indexer.head_dim, self.indexer.num_heads
        return (
            *self.latent.weights(hidden_size, tp_size),
            Matrix("attn.index_q", ("",), index_heads * dim, self.latent.q_lora_rank),
            Matrix("attn.index_k", ("",), dim, hidden_size),
            Matrix("attn.index_weights", ("",), index_heads, hidden_size, quantized=False),
            Matrix("attn.index_pool", ("",), dim, hidden_size, quantized=False),
            Elements((2 + self.block) * dim, "float32"),
        )

    def activation_elements(self, tp_size: int) -> int:
        """Returns the elements of queries in both forms, latents that attention returns and outputs, beside those of
        the indexer and the slots of what it selects, of 32 bits each."""
        latent, heads = self.latent, self.shares(tp_size).padded_heads
        absorbed = heads * (2 * latent.kv_lora_rank + latent.qk_dim + latent.v_dim)
        index = (2 * self.indexer.num_heads + 8) * self.indexer.head_dim
        return absorbed + latent.kv_lora_rank + latent.q_lora_rank + index + 2 * (self.budget + self.indexer.top_k)
