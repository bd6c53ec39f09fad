"""Attention over one latent a token (MLA), as a mixer of `layer_spec`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from sglang.srt.configs.rope import RopeSpec
from sglang.srt.kernels.spec import Need
from sglang.srt.plan.attention_parts import (
    PLAIN_LATENT_NORMS,
    AttentionTemperature,
    ElementGate,
    Gate,
    LatentNorms,
)
from sglang.srt.plan.block_defaults import HeadDims, MixerDefaults
from sglang.srt.plan.cache_spec import (
    FULL,
    CacheSpec,
    CacheTensor,
    Full,
    Window,
    dcp_sharded,
    latent_cache,
    packed_latent_cache,
)
from sglang.srt.plan.kv_spec import FP4_KV, KV_DTYPE_BYTES
from sglang.srt.plan.latent_record import LatentRecord, entry_cache
from sglang.srt.plan.layer_spec import AttentionShape, AttentionSite, ParallelConfig, needs_of_parts
from sglang.srt.plan.ranks import HeadShares
from sglang.srt.plan.weight_spec import Elements, Matrix, Weights

if TYPE_CHECKING:
    from typing import Self

KEY_NORM_EPS = 1e-6
"""Usual epsilon of the norm of an indexer's keys, independent of `rms_norm_eps`."""


@dataclass(frozen=True, slots=True)
class Indexer:
    """An indexer that scores every cached token with few small heads and selects the `top_k` best for attention
    (DeepSeek-V3.2).

    is_neox_style: as in RopeSpec, for its own heads
    rotary_last: the last dims of its heads rotate instead of the first
    key_eps: epsilon of the keys' norm
    """

    num_heads: int
    head_dim: int
    top_k: int
    is_neox_style: bool = True
    rotary_last: bool = False
    key_eps: float = KEY_NORM_EPS

    def first_rotary(self, rope_dim: int) -> int:
        """Returns the first of `rope_dim` dims of a head that rotate."""
        return self.head_dim - rope_dim if self.rotary_last else 0

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]:
        dims, heads = (self.head_dim, self.head_dim), (self.num_heads, 1)
        yield parallel.need("index_key_store", dims)
        yield parallel.need("index_queries", dims, heads=heads)
        yield parallel.need("sparse_indexer", dims, heads=heads)

    def pooled_needs(self, parallel: ParallelConfig, weighted: bool = True) -> Iterator[Need]:
        """Yields the needs of keys that stand for several tokens, and of queries: in 16 bits the kernel that makes such
        keys stores them itself, and queries without weights of heads (`weighted`) stay as they are."""
        keys, heads = parallel.of_index_keys, (self.num_heads, 1)
        dims = (self.head_dim, self.head_dim)
        if KV_DTYPE_BYTES[keys.kv_dtype] == 1:
            yield keys.need("index_key_store", dims)
            yield keys.need("index_queries", dims, heads=heads)
        elif weighted:
            yield Need("index_queries", q_dtype=parallel.dtype)
        yield keys.need("sparse_indexer", dims, heads=heads)

    def cache(self, parallel: ParallelConfig, entries_per_token: Fraction = Fraction(1)) -> CacheSpec:
        """Returns the cache of the indexer's keys, which every rank holds whole; 8-bit keys have an fp32 scale each."""
        tensors: tuple[CacheTensor, ...] = (CacheTensor("k", (1, self.head_dim), parallel.kv_dtype),)
        if KV_DTYPE_BYTES[parallel.kv_dtype] == 1:
            tensors += (CacheTensor("scale", (1,), "float32"),)
        return CacheSpec("index", tensors, entries_per_token)


@dataclass(frozen=True, slots=True)
class MLA(MixerDefaults):
    """Latent attention (DeepSeek-V2, arXiv 2405.04434): one latent and one rotary key a token, for all heads.

    Decode multiplies q by W_UK and the output by W_UV (absorbed), so that it reads latents only; prompts attend to
    expanded keys of `nope_dim + rope_dim` and values of `v_dim`.

        q_lora_rank: 0: q is not compressed
        top_k: > 0: attention is over that many tokens, selected by `indexer`; None: by the last layer before that has
            one
        input_size: as in GQA
        gate: of each head of the output, or of each of its elements, by a projection of its own
        sinks: as in Softmax
        window: tokens that a token attends to, itself among them; 0: all before it. Latents of windows, which are few,
            have 16 bits whatever the cache's dtype, and every rank has all of them
    """

    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    rope: RopeSpec | None = None
    top_k: int = 0
    indexer: Indexer | None = None
    input_size: int = 0
    attn_temperature: AttentionTemperature | None = None
    gate: Gate | None = None
    sinks: bool = False
    window: int = 0
    norms: LatentNorms = PLAIN_LATENT_NORMS

    @property
    def lifetime(self) -> Full | Window:
        """Lifetime of the latents."""
        return Window(self.window) if self.window else FULL

    @property
    def sparse(self) -> bool:
        return self.top_k > 0

    @property
    def follows_layer(self) -> bool:
        """Returns whether the layer takes the selection of an earlier layer."""
        return self.sparse and self.indexer is None

    @property
    def latents(self) -> MLA:
        return self

    @property
    def latent_heads(self) -> MLA:
        return self

    @property
    def short_prefill_graphs(self) -> bool:
        return True

    @property
    def cache_scale_bytes(self) -> int:
        return 0 if self.sparse or self.window else 4

    def selected_slots(self, tp_size: int) -> int:
        return self.top_k

    def with_input_size(self, size: int) -> Self:
        return replace(self, input_size=size)

    @property
    def value_dim(self) -> int:
        return self.kv_lora_rank

    @property
    def qk_dim(self) -> int:
        """Elements of a head of queries, and of expanded keys."""
        return self.nope_dim + self.rope_dim

    @property
    def softmax_scale(self) -> float:
        """Scale of the products of queries and keys, with YaRN's attention factor (`mscale_all_dim`), squared because q
        and k would each have it."""
        params = dict(self.rope.params) if self.rope is not None else {}
        factor = float(params.get("factor", 1.0))
        growth = 0.1 * float(params.get("mscale_all_dim") or 0.0) * math.log(factor) if factor > 1 else 0.0
        return float(self.qk_dim**-0.5 * (1.0 + growth) ** 2)

    def expanding_pays(self, prefix_lens: Sequence[int], new_lens: Sequence[int]) -> bool:
        """Returns whether expanded keys and values take fewer multiplications than absorbed latents for prompts of
        new_lens tokens each, over prefix_lens cached ones. Expanding the new tokens costs the same as absorbing their
        queries and outputs.

        Example: DeepSeek-V3 with one request and a long prefix: from 171 new tokens on.
        """
        lens = [*zip(self.expanded_lens(prefix_lens), new_lens, strict=True)]
        pairs = sum(self._pairs(prefix, new) for prefix, new in lens)
        saved = self.latent_dim + self.kv_lora_rank - self.qk_dim - self.v_dim
        return pairs * saved > sum(prefix for prefix, _ in lens) * self.kv_lora_rank * (self.nope_dim + self.v_dim)

    def expanded_lens(self, prefix_lens: Sequence[int]) -> list[int]:
        """Returns how many tokens at the end of each prefix new tokens see."""
        return [min(prefix, self.window - 1) if self.window else prefix for prefix in prefix_lens]

    def _pairs(self, prefix: int, new: int) -> int:
        """Returns the pairs of `new` tokens and the tokens that they see, with `prefix` cached ones before them."""
        growing = max(0, min(new, self.window - prefix)) if self.window else new
        return growing * prefix + growing * (growing + 1) // 2 + (new - growing) * self.window

    def shares(self, tp_size: int) -> HeadShares:
        """Returns how heads are divided over ranks. They share only the latent, which every rank has."""
        return HeadShares(self.num_heads, self.num_heads, tp_size)

    def effective_dcp_size(self, tp_size: int, dcp_size: int) -> int:
        """Returns over how many ranks the latents are sharded; without DCP each of these would hold all of them."""
        return dcp_size if tp_size % dcp_size == 0 and not self.window else 1

    def head_dims(self) -> Iterator[HeadDims]:
        """Yields the rows and columns of each matrix that go with a head, from which shares of ranks follow."""
        queries = ("attn.q_b", "") if self.q_lora_rank else ("attn.qkv_a", "q_proj")
        yield HeadDims(queries[0], (queries[1],), 0, self.qk_dim)
        yield HeadDims("attn.kv_b", ("",), 0, self.nope_dim + self.v_dim)
        yield HeadDims("attn.o", ("",), 1, self.v_dim)
        if isinstance(self.gate, ElementGate):
            yield HeadDims("attn.gate", ("",), 0, self.v_dim)

    def scaled_head_dims(self, tp_size: int) -> Iterator[HeadDims]:
        return self.head_dims()

    def _with_index_dtype(self, parallel: ParallelConfig) -> ParallelConfig:
        """Returns the config with the cache dtype of index keys: e4m3 with one scale a key, as published, whatever the
        latents' dtype; the model's dtype where that is fp32."""
        return replace(parallel, kv_dtype="fp8_e4m3" if KV_DTYPE_BYTES[parallel.dtype] == 2 else parallel.dtype)

    def packed(self, kv_dtype: str) -> bool:
        """Returns whether cache entries are packed bytes of several dtypes, as those of sparse layers in an FP8 cache
        are, and all in four bits but those of windows."""
        return (kv_dtype == FP4_KV and not self.window) or (self.sparse and kv_dtype.startswith("fp8"))

    def record(self, kv_dtype: str) -> LatentRecord | None:
        """Returns how latents are stored in four bits; None: in another way."""
        in_four_bits = kv_dtype == FP4_KV and not self.window
        return LatentRecord(self.kv_lora_rank, self.rope_dim, 4) if in_four_bits else None

    @property
    def latent_dim(self) -> int:
        """Elements of a latent and its rotary key."""
        return self.kv_lora_rank + self.rope_dim

    def stored(self, parallel: ParallelConfig) -> ParallelConfig:
        """Returns the config with the dtype of this layer's latents."""
        return parallel.unquantized if self.window else parallel

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]:
        parallel = self.stored(parallel)
        latent, heads = (self.latent_dim, self.kv_lora_rank), (self.shares(parallel.attn_tp_size).padded_heads, 1)
        record = self.record(parallel.kv_dtype)
        stored = parallel if record is None else parallel.unquantized
        norms = ["mla", "key_norm"] if self.norms.rotary_key else ["mla"]
        yield stored.need("latent_norm_rope_store", latent, norms, heads, self.rope_dim)
        if self.indexer is not None:
            yield Need("index_norm_rope", q_dtype=parallel.dtype, heads=(self.indexer.num_heads, 1))
            yield from self.indexer.needs(self._with_index_dtype(parallel))
        # Prompts attend to keys and values expanded from latents, which are never quantized.
        dims = (self.qk_dim, self.v_dim)
        window = ["sliding_window"] if self.window else []
        sinks = ["sinks"] if self.sinks else []
        yield replace(parallel, kv_dtype=parallel.dtype).need("latent_prompt_attention", dims, [*window, *sinks])
        yield Need("latent_absorb", q_dtype=parallel.dtype, heads=heads)
        # A DCP rank attends to its own tokens with the heads of all DCP ranks.
        dcp_size = self.effective_dcp_size(parallel.attn_tp_size, parallel.ranks.dcp_size)
        traits = ["mla", "token_shares", *sinks] if dcp_size > 1 else ["mla", *window, *sinks]
        if dcp_size > 1:
            yield from needs_of_parts(parallel)
        heads = (heads[0] * dcp_size, 1)
        # Sparse layers attend densely to requests with no more tokens than the indexer would select.
        dense = replace(parallel, kv_dtype=parallel.dtype) if self.packed(parallel.kv_dtype) else parallel
        yield dense.need("extend_attention", latent, traits)
        yield dense.need("decode_attention", latent, traits, heads)
        if self.sparse or record is not None:
            yield parallel.need("sparse_attention", latent, ["mla", *sinks], heads)
        if record is not None:
            yield parallel.need("latent_record_store", latent)
        elif self.packed(parallel.kv_dtype):
            yield parallel.need("latent_pack_store", latent, ["mla"])
        if self.gate is not None:
            yield from self.gate.needs(parallel)

    def caches(self, parallel: ParallelConfig) -> tuple[CacheSpec, ...]:
        parallel = self.stored(parallel)
        record = self.record(parallel.kv_dtype)
        if record is not None:
            latent = entry_cache("latent", self.latent_dim, parallel.kv_dtype, record)
        elif self.packed(parallel.kv_dtype):
            latent = packed_latent_cache("latent")
        else:
            dims = (self.latent_dim, self.kv_lora_rank)
            latent = latent_cache("latent", *dims, parallel.kv_dtype, lifetime=self.lifetime)
        latent = dcp_sharded(latent, self.effective_dcp_size(parallel.attn_tp_size, parallel.ranks.dcp_size))
        return (latent,) if self.indexer is None else (latent, self.indexer.cache(self._with_index_dtype(parallel)))

    def attention_shape(self, tp_size: int) -> AttentionShape:
        return AttentionShape(self.shares(tp_size).padded_heads, 1, self.latent_dim, self.kv_lora_rank)

    def attention_site(self, tp_size: int, dcp_size: int) -> AttentionSite:
        sharing = self.effective_dcp_size(tp_size, dcp_size)
        return AttentionSite(self.attention_shape(tp_size), self.window, self.top_k, sharing)

    def weights(self, hidden_size: int, tp_size: int) -> Weights:
        heads = self.shares(tp_size).padded_heads
        width = self.input_size or hidden_size
        q_rows, q_cols = heads * self.qk_dim, self.q_lora_rank or width
        first, rows = ("q_a_proj", self.q_lora_rank) if self.q_lora_rank else ("q_proj", q_rows)
        parts: list[Matrix | Elements] = [
            Matrix(
                "attn.qkv_a",
                (first, "kv_a_proj_with_mqa"),
                rows + self.latent_dim,
                width,
                part_rows=(rows, self.latent_dim),
            ),
            # W_UK and W_UV (kv_b_proj) are always held in the model's dtype.
            Elements(heads * (self.nope_dim + self.v_dim) * self.kv_lora_rank),
            Matrix("attn.o", ("",), hidden_size, heads * self.v_dim),
            *self.norms.weights(self.q_lora_rank + self.kv_lora_rank, self.rope_dim),
        ]
        if self.q_lora_rank:
            parts.append(Matrix("attn.q_b", ("",), q_rows, self.q_lora_rank))
        if isinstance(self.gate, ElementGate):
            parts.append(Matrix("attn.gate", ("",), heads * self.v_dim, width))
        elif self.gate is not None:  # every rank holds all of it
            parts += self.gate.weights(self.num_heads, width)
        if self.sinks:
            parts.append(Elements(heads, "float32"))
        if self.indexer is not None:
            dim, index_heads = self.indexer.head_dim, self.indexer.num_heads
            parts += (
                Matrix("attn.index_q", ("",), index_heads * dim, q_cols),
                Matrix("attn.index_k", ("",), dim, width),
                Matrix(
                    "attn.index_weights", ("",), index_heads, width, quantized=False, dtype="float32", adapted=False
                ),
                Elements(2 * dim, "float32"),
            )
        return tuple(parts)

    def activation_elements(self, tp_size: int) -> int:
        """Returns the elements of a token in the larger of both forms, and of the latents. Absorbed: queries twice, the
        latents that attention returns, outputs. Expanded: queries, keys, values, outputs, in fp32 too, and keys and
        values of a chunk of as many tokens as a step has."""
        absorbed = 2 * self.latent_dim + self.qk_dim + self.v_dim
        expanded = 3 * self.qk_dim + 5 * self.v_dim
        heads = self.shares(tp_size).padded_heads
        return heads * max(absorbed, expanded) + self.kv_lora_rank + self.q_lora_rank
