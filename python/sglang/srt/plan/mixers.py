"""Attention over keys and values (GQA) and over one latent a token (MLA), as mixers of `layer_spec`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from sglang.srt.configs.rope import RopeSpec
from sglang.srt.kernels.spec import Need
from sglang.srt.plan.attention_parts import (
    APART,
    NO_BIASES,
    OWN_CACHE,
    PLAIN_SOFTMAX,
    PLAIN_VALUES,
    AttentionTemperature,
    Biases,
    CacheOfLayer,
    ElementGate,
    Gate,
    KVConvolution,
    OwnCache,
    PerHead,
    QKNorm,
    Softmax,
    StoredQKV,
    Unweighted,
    Values,
    Whole,
)
from sglang.srt.plan.block_defaults import HeadDims, MixerDefaults
from sglang.srt.plan.block_selection import BlockIndexer
from sglang.srt.plan.fused_rows import FUSED_PART, fused_rows, keep_groups
from sglang.srt.plan.kv_spec import KV_DTYPE_BYTES, refuse_fp4
from sglang.srt.plan.layer_spec import (
    PER_REQUEST,
    AttentionShape,
    AttentionSite,
    CacheSpec,
    CacheTensor,
    Elements,
    Matrix,
    ParallelConfig,
    Weights,
    dcp_sharded,
    key_value_cache,
    latent_cache,
    packed_latent_cache,
    uneven_sizes,
)
from sglang.srt.plan.masks import CAUSAL, Causal, Mask, RowBlock, SlidingWindow
from sglang.srt.plan.ranks import HeadShares, ShardRange

if TYPE_CHECKING:
    from typing import Self


@dataclass(frozen=True, slots=True)
class GQA(MixerDefaults):
    """Grouped-query attention: `num_heads / num_kv_heads` query heads share a KV head.

    The other fields are values that say one thing each (`attention_parts`, `masks`). None, or the default, means that
    the model has nothing of the kind.

    hybrid_kind: trait of models whose other layers have a recurrent state (`kernels.conditions.HYBRIDS`)
    input_size: input elements of the q, k and v projections, where that is not the hidden size (drafts)
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    values: Values = PLAIN_VALUES
    cache: OwnCache | CacheOfLayer = OWN_CACHE
    mask: Mask = CAUSAL
    qk_norm: QKNorm | None = None
    biases: Biases = NO_BIASES
    gate: Gate | None = None
    softmax: Softmax = PLAIN_SOFTMAX
    attn_temperature: AttentionTemperature | None = None
    kv_convolution: KVConvolution | None = None
    stored: StoredQKV = APART
    hybrid_kind: str = ""
    input_size: int = 0

    @property
    def v_head_dim(self) -> int:
        return self.values.dim or self.head_dim

    @property
    def value_dim(self) -> int:
        return self.v_head_dim

    @property
    def window(self) -> int:
        return self.mask.window

    @property
    def indexer(self) -> BlockIndexer | None:
        return self.mask.indexer

    @property
    def top_k(self) -> int:
        """Number of tokens that a token attends to by the indexer's selection; 0: no selection."""
        return 0 if self.indexer is None else self.indexer.top_k

    @property
    def rotary_dim(self) -> int:
        return self.rope.rot_dim

    @property
    def softmax_scale(self) -> float:
        return self.softmax.scale or self.head_dim**-0.5

    @property
    def caches_tokens(self) -> bool:
        """Returns whether the layer has keys and values of its own."""
        return isinstance(self.cache, OwnCache)

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads

    @property
    def defers_all_reduce(self) -> bool:
        return not self.biases.output and not isinstance(self.qk_norm, Whole)

    @property
    def cache_scale_bytes(self) -> int:
        return 8 if self.caches_tokens else 0

    @property
    def block_indexer(self) -> BlockIndexer | None:
        return self.indexer

    @property
    def short_prefill_graphs(self) -> bool:
        return self.indexer is not None

    def selected_slots(self, tp_size: int) -> int:
        return 0 if self.indexer is None else self.shares(tp_size).padded_kv_heads * self.indexer.top_blocks

    def token_scores(self, context_len: int, tp_size: int) -> int:
        if self.indexer is None:
            return context_len
        return self.shares(tp_size).padded_kv_heads * -(-context_len // self.indexer.block)

    def reading(self, layer: int) -> GQA:
        """Returns the mixer without keys and values of its own: it attends to those of layer number `layer`."""
        return replace(self, cache=CacheOfLayer(layer), values=Values(self.values.dim))

    def in_blocks(self, size: int) -> Self:
        assert isinstance(self.mask, Causal | SlidingWindow), "rows of drafts see all tokens, or a window"
        return replace(self, mask=RowBlock(size, self.mask))

    def with_input_size(self, size: int) -> Self:
        return replace(self, input_size=size)

    def lagging(self, draft_tokens: int, convolved: bool) -> Self:
        convolution = self.kv_convolution
        if convolution is not None and convolved:
            convolution = replace(convolution, window_slack=draft_tokens)
        return replace(self, mask=self.mask.lagging(draft_tokens), kv_convolution=convolution)

    def with_scale_rows(self, rows_of: Callable[[Matrix], int]) -> Self:
        return replace(self, stored=replace(self.stored, scale_rows=rows_of(Matrix("attn.qkv", ("q",), 0, 0))))

    def shares(self, tp_size: int) -> HeadShares:
        """Returns how query and KV heads are divided over ranks."""
        return HeadShares(self.num_heads, self.num_kv_heads, tp_size)

    def share_problems(self, tp_size: int, module_of: Callable[[str, str], str]) -> Iterator[str]:
        shares = self.shares(tp_size)
        if isinstance(self.qk_norm, Whole) and shares.kv_copies is None:
            yield (
                f"--tp-size {tp_size} is no multiple of the model's {self.num_kv_heads} KV heads, over all of which"
                " keys are normed"
            )
        if self.stored.tp_blocks and self.cuts_scales(tp_size) and shares.padded:
            fused = module_of("attn.qkv", FUSED_PART)
            yield (
                f"--tp-size {tp_size} gives some ranks more heads than others, for which the tensor with q, k and v at"
                f" once ({fused}) is not cut within {self.stored.scale_rows} rows of one scale"
            )

    def scaled_head_dims(self, tp_size: int) -> Iterator[HeadDims]:
        in_place = self.stored.tp_blocks > 0 or self.dequantized(tp_size)
        return (part for part in self.head_dims() if not in_place or part.matrix != "attn.qkv")

    def effective_dcp_size(self, tp_size: int, dcp_size: int) -> int:
        """Returns over how many ranks the tokens of the cache are sharded: `dcp_size` where that many ranks would hold
        the same KV head, else 1. Windows (which are short), blocks that an indexer selects and layers with relative
        biases are not sharded."""
        copies = self.shares(tp_size).kv_copies
        shared = copies is not None and copies % dcp_size == 0
        return dcp_size if shared and self.mask == CAUSAL and not self.softmax.extent else 1

    def dequantized(self, tp_size: int) -> bool:
        """Returns whether ranks hold q, k and v in the model's dtype although the checkpoint quantizes them, because a
        rank's heads begin or end within rows that share scales."""
        return not self.shares(tp_size).padded and self.cuts_scales(tp_size)

    def cuts_scales(self, tp_size: int) -> bool:
        """Returns whether dividing q, k and v over ranks separates rows that share scales in the checkpoint."""
        if self.stored.scale_rows == 1:
            return False
        if self.stored.tp_blocks:
            rows = (self.fused_rows(tp_size, rank) for rank in range(tp_size))
            return not all(keep_groups(shares, self.stored.scale_rows) for shares in rows)
        shares = self.shares(tp_size)
        return any(
            shares.cuts(part.dims, part.of_kv, rank, self.stored.scale_rows)
            for part in self.head_dims()
            if part.matrix == "attn.qkv"
            for rank in range(tp_size)
        )

    def fused_rows(self, tp_size: int, rank: int) -> tuple[ShardRange, ...]:
        """Returns a rank's runs of rows of the fused tensor of q, k and v, in the order in which it holds them."""
        shares = self.shares(tp_size)
        parts = (
            (shares.heads(rank), self.head_dim),
            (shares.kv_heads(rank), self.head_dim),
            (shares.kv_heads(rank), self.v_head_dim),
        )
        return fused_rows(parts, self.stored.tp_blocks)

    def head_dims(self) -> Iterator[HeadDims]:
        """Yields the rows and columns of each matrix that go with a head, from which shares of ranks follow."""
        yield HeadDims("attn.qkv", ("q",), 0, self.head_dim)
        if self.caches_tokens:
            yield HeadDims("attn.qkv", ("k",), 0, self.head_dim, of_kv=True)
            if not self.values.from_keys:
                yield HeadDims("attn.qkv", ("v",), 0, self.v_head_dim, of_kv=True)
        if self.gate is not None:
            yield from self.gate.head_dims(self.v_head_dim)
        if (bias := self.softmax.relative_bias) is not None:
            yield HeadDims("attn.relative", ("",), 0, bias.dims)
        if self.indexer is not None:
            yield HeadDims("attn.index", ("index_q_proj",), 0, self.indexer.head_dim, of_kv=True)
        yield HeadDims("attn.o", ("",), 1, self.v_head_dim)

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]:
        dims = (self.head_dim, self.v_head_dim)
        shares = self.shares(parallel.attn_tp_size)
        heads = (shares.padded_heads, shares.padded_kv_heads)
        norms = ["head_norm"] if isinstance(self.qk_norm, PerHead | Unweighted) else []
        if isinstance(self.qk_norm, Whole):
            yield Need("qk_whole_norm", q_dtype=parallel.dtype)
        if self.values.norm:
            yield Need("value_norm", q_dtype=parallel.dtype)
        if self.caches_tokens:
            yield parallel.need("qk_norm_rope_store", dims, norms, heads, self.rotary_dim)
        else:
            yield Need("q_norm_rope", q_dtype=parallel.dtype)
        traits = [*self.mask.traits, *self.softmax.traits]
        traits += [self.hybrid_kind] if self.hybrid_kind else []
        if self.effective_dcp_size(parallel.attn_tp_size, parallel.dcp_size) > 1:
            traits.append("token_shares")
            yield from _parts(parallel)
        yield parallel.need("extend_attention", dims, traits)
        yield parallel.need("decode_attention", dims, traits)
        if self.indexer is not None:
            yield from self.indexer.needs(parallel, heads[1], self.rotary_dim)
            yield parallel.need("block_attention", dims, uneven_sizes(self.indexer.block, self.head_dim), heads)
        if self.kv_convolution is not None:
            yield Need("short_convolution", q_dtype=parallel.dtype)
        if self.gate is not None:
            yield from self.gate.needs(parallel)

    def caches(self, parallel: ParallelConfig) -> tuple[CacheSpec, ...]:
        if not self.caches_tokens:
            return ()
        heads = self.shares(parallel.attn_tp_size).padded_kv_heads
        cache = key_value_cache("kv", heads, self.head_dim, self.v_head_dim, parallel.kv_dtype, self.mask.lifetime)
        dcp_size = self.effective_dcp_size(parallel.attn_tp_size, parallel.dcp_size)
        if dcp_size > 1:
            refuse_fp4(parallel.kv_dtype, f"with --dcp-size {parallel.dcp_size} ranks share out their tokens")
        if self.softmax.extent:
            refuse_fp4(parallel.kv_dtype, "attention with relative biases has no kernel for them")
        if self.kv_convolution is not None:
            rows = self.kv_convolution.over(self.kv_channels(parallel.attn_tp_size)).rows("rows", parallel.dtype)
            return cache, CacheSpec("kv_rows", (rows,), lifetime=PER_REQUEST)
        if self.indexer is None:
            return (dcp_sharded(cache, dcp_size),)
        refuse_fp4(parallel.kv_dtype, "keys and values that an indexer selects by blocks have a byte an element")
        return (replace(cache, neighbours=self.indexer.block), self.indexer.cache(parallel))

    def convolved_elements(self, tp_size: int) -> int:
        return 0 if self.kv_convolution is None else self.kv_channels(tp_size)

    def kv_channels(self, tp_size: int) -> int:
        """Returns the elements of a rank's k and v of one token, over which convolutions are concatenated."""
        return self.shares(tp_size).padded_kv_heads * (self.head_dim + self.v_head_dim)

    def attention_shape(self, tp_size: int) -> AttentionShape:
        """Returns the heads with which decode attends. All rows of a block see the same tokens, so they count as more
        heads of one row."""
        shares = self.shares(tp_size)
        heads = shares.padded_heads * self.mask.rows
        return AttentionShape(heads, shares.padded_kv_heads, self.head_dim, self.v_head_dim)

    def attention_site(self, tp_size: int, dcp_size: int) -> AttentionSite:
        sharing = self.effective_dcp_size(tp_size, dcp_size)
        return AttentionSite(self.attention_shape(tp_size), self.window, self.top_k, sharing, self.mask.chunked)

    def weights(self, hidden_size: int, tp_size: int) -> Weights:
        heads, kv_heads = self.shares(tp_size).padded_heads, self.shares(tp_size).padded_kv_heads
        q, k = heads * self.head_dim, kv_heads * self.head_dim
        parts = {"q": q, "k": k, "v": kv_heads * self.v_head_dim}
        if isinstance(self.gate, ElementGate):
            parts |= {"gate": heads * self.v_head_dim} if self.gate.own_projection else {"q": 2 * q}
        if not self.caches_tokens:
            parts, k = {"q": parts["q"]}, 0
        elif self.values.from_keys:
            del parts["v"]
        norms = () if self.qk_norm is None else (self.qk_norm.weights(self.head_dim, q, k),)
        conv = self.kv_convolution
        width, rows = self.input_size or hidden_size, sum(parts.values())
        modules = (FUSED_PART,) if self.stored.tp_blocks else tuple(parts)
        return (
            Matrix("attn.qkv", modules, rows, width, self.biases.qkv, quantized=not self.dequantized(tp_size)),
            *(self.gate.weights(heads, width) if self.gate is not None else ()),
            Matrix("attn.o", ("",), hidden_size, heads * self.v_head_dim, self.biases.output),
            *norms,
            *self.softmax.weights(heads, width),
            *(() if conv is None else (conv.over(self.kv_channels(tp_size)).weights(),)),
            *(self.indexer.weights(hidden_size, kv_heads) if self.indexer is not None else ()),
        )

    def activation_elements(self, tp_size: int) -> int:
        shares = self.shares(tp_size)
        index = 0 if self.indexer is None else 2 * (shares.padded_kv_heads + 1) * self.indexer.head_dim
        bias = self.softmax.relative_bias
        biases = 0 if bias is None else shares.padded_heads * bias.elements
        convolved = 2 * self.convolved_elements(tp_size)
        return (3 * shares.padded_heads + 2 * shares.padded_kv_heads) * self.head_dim + index + biases + convolved


@dataclass(frozen=True, slots=True)
class Indexer:
    """An indexer that scores every cached token with few small heads and selects the `top_k` best for attention
    (DeepSeek-V3.2). `is_neox_style`: as in RopeSpec, for its own heads."""

    num_heads: int
    head_dim: int
    top_k: int
    is_neox_style: bool = True

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]:
        dims, heads = (self.head_dim, self.head_dim), (self.num_heads, 1)
        yield parallel.need("index_key_store", dims)
        yield parallel.need("index_queries", dims, heads=heads)
        yield parallel.need("sparse_indexer", dims, heads=heads)

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
    def short_prefill_graphs(self) -> bool:
        return True

    @property
    def cache_scale_bytes(self) -> int:
        return 0 if self.sparse else 4

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
        pairs = sum(new * prefix + new * (new + 1) // 2 for prefix, new in zip(prefix_lens, new_lens, strict=True))
        saved = self.latent_dim + self.kv_lora_rank - self.qk_dim - self.v_dim
        return pairs * saved > sum(prefix_lens) * self.kv_lora_rank * (self.nope_dim + self.v_dim)

    def shares(self, tp_size: int) -> HeadShares:
        """Returns how heads are divided over ranks. They share only the latent, which every rank has."""
        return HeadShares(self.num_heads, self.num_heads, tp_size)

    def effective_dcp_size(self, tp_size: int, dcp_size: int) -> int:
        """Returns over how many ranks the latents are sharded; without DCP each of these would hold all of them."""
        return dcp_size if tp_size % dcp_size == 0 else 1

    def head_dims(self) -> Iterator[HeadDims]:
        """Yields the rows and columns of each matrix that go with a head, from which shares of ranks follow."""
        queries = ("attn.q_b", "") if self.q_lora_rank else ("attn.qkv_a", "q_proj")
        yield HeadDims(queries[0], (queries[1],), 0, self.qk_dim)
        yield HeadDims("attn.kv_b", ("",), 0, self.nope_dim + self.v_dim)
        yield HeadDims("attn.o", ("",), 1, self.v_dim)

    def scaled_head_dims(self, tp_size: int) -> Iterator[HeadDims]:
        return self.head_dims()

    def _with_index_dtype(self, parallel: ParallelConfig) -> ParallelConfig:
        """Returns the config with the cache dtype of index keys: e4m3 with one scale a key, as published, whatever the
        latents' dtype; the model's dtype where that is fp32."""
        return replace(parallel, kv_dtype="fp8_e4m3" if KV_DTYPE_BYTES[parallel.dtype] == 2 else parallel.dtype)

    def packed(self, kv_dtype: str) -> bool:
        """Returns whether cache entries are packed bytes of several dtypes, as those of sparse layers in an FP8 cache
        are."""
        return self.sparse and kv_dtype.startswith("fp8")

    @property
    def latent_dim(self) -> int:
        """Elements of a latent and its rotary key."""
        return self.kv_lora_rank + self.rope_dim

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]:
        latent, heads = (self.latent_dim, self.kv_lora_rank), (self.shares(parallel.attn_tp_size).padded_heads, 1)
        yield parallel.need("latent_norm_rope_store", latent, ["mla"], heads, self.rope_dim)
        if self.indexer is not None:
            yield Need("index_norm_rope", q_dtype=parallel.dtype, heads=(self.indexer.num_heads, 1))
            yield from self.indexer.needs(self._with_index_dtype(parallel))
        # Prompts attend to keys and values expanded from latents, which are never quantized.
        dims = (self.qk_dim, self.v_dim)
        yield replace(parallel, kv_dtype=parallel.dtype).need("latent_prompt_attention", dims)
        yield Need("latent_absorb", q_dtype=parallel.dtype, heads=heads)
        # A DCP rank attends to its own tokens with the heads of all DCP ranks.
        dcp_size = self.effective_dcp_size(parallel.attn_tp_size, parallel.dcp_size)
        traits = ["mla", "token_shares"] if dcp_size > 1 else ["mla"]
        if dcp_size > 1:
            yield from _parts(parallel)
        heads = (heads[0] * dcp_size, 1)
        # Sparse layers attend densely to requests with no more tokens than the indexer would select.
        dense = replace(parallel, kv_dtype=parallel.dtype) if self.packed(parallel.kv_dtype) else parallel
        yield dense.need("extend_attention", latent, traits)
        yield dense.need("decode_attention", latent, traits, heads)
        if self.sparse:
            yield parallel.need("sparse_attention", latent, ["mla"], heads)
        if self.packed(parallel.kv_dtype):
            yield parallel.need("latent_pack_store", latent, ["mla"])

    def caches(self, parallel: ParallelConfig) -> tuple[CacheSpec, ...]:
        refuse_fp4(parallel.kv_dtype, "latents (MLA) are keys and values of all heads, and have a byte an element")
        if self.packed(parallel.kv_dtype):
            latent = packed_latent_cache("latent")
        else:
            latent = latent_cache("latent", self.latent_dim, self.kv_lora_rank, parallel.kv_dtype)
        latent = dcp_sharded(latent, self.effective_dcp_size(parallel.attn_tp_size, parallel.dcp_size))
        return (latent,) if self.indexer is None else (latent, self.indexer.cache(self._with_index_dtype(parallel)))

    def attention_shape(self, tp_size: int) -> AttentionShape:
        return AttentionShape(self.shares(tp_size).padded_heads, 1, self.latent_dim, self.kv_lora_rank)

    def attention_site(self, tp_size: int, dcp_size: int) -> AttentionSite:
        sharing = self.effective_dcp_size(tp_size, dcp_size)
        return AttentionSite(self.attention_shape(tp_size), top_k=self.top_k, dcp_size=sharing)

    def weights(self, hidden_size: int, tp_size: int) -> Weights:
        heads = self.shares(tp_size).padded_heads
        width = self.input_size or hidden_size
        q_rows, q_cols = heads * self.qk_dim, self.q_lora_rank or width
        first, rows = ("q_a_proj", self.q_lora_rank) if self.q_lora_rank else ("q_proj", q_rows)
        parts: list[Matrix | Elements] = [
            Matrix("attn.qkv_a", (first, "kv_a_proj_with_mqa"), rows + self.latent_dim, width),
            # W_UK and W_UV (kv_b_proj) are always held in the model's dtype.
            Elements(heads * (self.nope_dim + self.v_dim) * self.kv_lora_rank),
            Matrix("attn.o", ("",), hidden_size, heads * self.v_dim),
            Elements(self.q_lora_rank + self.kv_lora_rank),
        ]
        if self.q_lora_rank:
            parts.append(Matrix("attn.q_b", ("",), q_rows, self.q_lora_rank))
        if self.indexer is not None:
            dim, index_heads = self.indexer.head_dim, self.indexer.num_heads
            parts += (
                Matrix("attn.index_q", ("",), index_heads * dim, q_cols),
                Matrix("attn.index_k", ("",), dim, width),
                Matrix("attn.index_weights", ("",), index_heads, width, quantized=False, dtype="float32"),
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


def _parts(parallel: ParallelConfig) -> Iterator[Need]:
    """Yields the needs of DCP ranks, which attend to their own tokens and then merge their partial results."""
    for op in ("pack_parts", "merge_parts"):
        yield Need(op, q_dtype=parallel.dtype)
