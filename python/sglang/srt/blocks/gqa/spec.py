"""Grouped-query attention over keys and values, as a mixer of `layer_spec`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sglang.srt.blocks.block_selection.spec import BlockIndexer
from sglang.srt.blocks.token_selection.spec import TokenIndexer
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
from sglang.srt.plan.cache_spec import (
    PER_REQUEST,
    CacheSpec,
    dcp_sharded,
    key_value_cache,
)
from sglang.srt.plan.fused_rows import FUSED_PART, fused_rows, keep_groups
from sglang.srt.plan.kv_spec import refuse_fp4
from sglang.srt.plan.layer_spec import AttentionShape, AttentionSite, ParallelConfig, needs_of_parts, uneven_sizes
from sglang.srt.plan.masks import CAUSAL, Causal, Mask, RowBlock, SlidingWindow
from sglang.srt.plan.ranks import HeadShares, ShardRange
from sglang.srt.plan.weight_spec import Matrix, Weights

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
    def indexer(self) -> BlockIndexer | TokenIndexer | None:
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
    def block_indexer(self) -> BlockIndexer | TokenIndexer | None:
        return self.indexer

    @property
    def short_prefill_graphs(self) -> bool:
        return self.indexer is not None

    def selected_slots(self, tp_size: int) -> int:
        return 0 if self.indexer is None else self.indexer.selected_slots(self.shares(tp_size).padded_kv_heads)

    def token_scores(self, context_len: int, tp_size: int) -> int:
        if self.indexer is None:
            return context_len
        return self.indexer.token_scores(context_len, self.shares(tp_size).padded_kv_heads)

    def reading(self, layer: int) -> GQA:
        """Returns the mixer without keys and values of its own: it attends to those of layer number `layer`."""
        return replace(self, cache=CacheOfLayer(layer), values=Values(self.values.dim))

    def in_blocks(self, size: int, causal: bool = False) -> Self:
        assert isinstance(self.mask, Causal | SlidingWindow), "rows of drafts see all tokens, or a window"
        return replace(self, mask=RowBlock(size, self.mask, causal))

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
            yield from self.indexer.head_dims()
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
        if self.effective_dcp_size(parallel.attn_tp_size, parallel.ranks.dcp_size) > 1:
            traits.append("token_shares")
            yield from needs_of_parts(parallel)
        yield parallel.need("extend_attention", dims, traits)
        yield parallel.need("decode_attention", dims, traits)
        if self.indexer is not None:
            yield from self.indexer.needs(parallel, heads[1], self.rotary_dim)
            yield parallel.need("block_attention", dims, uneven_sizes(self.indexer.block), heads)
        if self.kv_convolution is not None:
            yield Need("short_convolution", q_dtype=parallel.dtype)
        if self.gate is not None:
            yield from self.gate.needs(parallel)

    def caches(self, parallel: ParallelConfig) -> tuple[CacheSpec, ...]:
        if not self.caches_tokens:
            return ()
        heads = self.shares(parallel.attn_tp_size).padded_kv_heads
        cache = key_value_cache("kv", heads, self.head_dim, self.v_head_dim, parallel.kv_dtype, self.mask.lifetime)
        dcp_size = self.effective_dcp_size(parallel.attn_tp_size, parallel.ranks.dcp_size)
        if dcp_size > 1:
            refuse_fp4(parallel.kv_dtype, f"with --dcp-size {parallel.ranks.dcp_size} ranks share out their tokens")
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
            Matrix(
                "attn.qkv",
                modules,
                rows,
                width,
                self.biases.qkv,
                quantized=not self.dequantized(tp_size),
                part_rows=() if self.stored.tp_blocks else tuple(parts.values()),
            ),
            *(self.gate.weights(heads, width) if self.gate is not None else ()),
            Matrix("attn.o", ("",), hidden_size, heads * self.v_head_dim, self.biases.output),
            *norms,
            *self.softmax.weights(heads, width),
            *(() if conv is None else (conv.over(self.kv_channels(tp_size)).weights(),)),
            *(self.indexer.weights(hidden_size, kv_heads) if self.indexer is not None else ()),
        )

    def activation_elements(self, tp_size: int) -> int:
        shares = self.shares(tp_size)
        index = 0 if self.indexer is None else self.indexer.activation_elements(shares.padded_kv_heads)
        bias = self.softmax.relative_bias
        biases = 0 if bias is None else shares.padded_heads * bias.elements
        convolved = 2 * self.convolved_elements(tp_size)
        return (3 * shares.padded_heads + 2 * shares.padded_kv_heads) * self.head_dim + index + biases + convolved
