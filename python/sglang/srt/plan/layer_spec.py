"""The description of a model as layers that say which ops, caches and weights they have. No torch.

`model_description.describe_model` makes them of a config.json, once. Needs, memory plan and `explain` follow from them:

    layer.mixer      how the tokens of a request see each other: GQA, MLA (`mixers`), CompressedSparse, GatedDelta,
                     KimiDelta
    layer.ffn        what each token goes through alone: Dense, MoE (`feed_forward`)
    layer.inputs     what a token itself adds in every layer: PerLayerEmbedding (`per_layer`), in few families
    layer.ngrams     what a token and those before it add before a layer: NgramEmbedding (`ngram_embedding`), likewise
    layer.residual   how they add to the stream
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Protocol

from sglang.srt.configs.rope import RopeSpec
from sglang.srt.kernels.spec import Need
from sglang.srt.plan.kv_spec import FP4_GROUP, FP4_KV, PACKED_LATENT_BYTES, STORED_BYTES, refuse_fp4
from sglang.srt.plan.ranks import RankLayout


@dataclass(frozen=True, slots=True)
class Full:
    """Lifetime of entries that are kept as long as their token is."""


@dataclass(frozen=True, slots=True)
class Window:
    """Lifetime of entries that are kept for the last `tokens` tokens of a request; `chunked`: only for those of them
    that are in the chunk of the next token, where chunks of so many tokens follow one another from the first on."""

    tokens: int
    chunked: bool = False


@dataclass(frozen=True, slots=True)
class PerRequest:
    """Lifetime of an entry that each running request has once, whatever its length."""


FULL, PER_REQUEST = Full(), PerRequest()
Lifetime = Full | Window | PerRequest


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """One tensor of a cache, [entries, *shape]. With `view_of` it is the first columns of another one of the cache and
    costs nothing."""

    name: str  # "k", "v", "scale", "conv", ...
    shape: tuple[int, ...]
    dtype: str
    view_of: str = ""

    @property
    def entry_bytes(self) -> int:
        return 0 if self.view_of else math.prod(self.shape) * STORED_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """One cache of one layer, on one rank; its name is unique in the layer.

    1/4 entry a token: one entry for every fourth token. A PER_REQUEST cache has an entry a request. `neighbours`: so
    many tokens, from a multiple of their number on, have entries that follow one another.
    """

    name: str  # "kv", "latent", "index", "compressed", "state"
    tensors: tuple[CacheTensor, ...]
    entries_per_token: Fraction = Fraction(1)
    lifetime: Lifetime = FULL
    dcp_size: int = 1
    """Number of ranks that share out the tokens: this one keeps the entries of every dcp_size-th position."""
    neighbours: int = 1

    @property
    def entry_bytes(self) -> int:
        return sum(tensor.entry_bytes for tensor in self.tensors)


def key_value_cache(
    name: str, heads: int, head_dim: int, v_head_dim: int, dtype: str, lifetime: Lifetime = FULL
) -> CacheSpec:
    """Returns a cache of keys [heads, head_dim] and values [heads, v_head_dim] of every token. Raises UserError for
    heads that four-bit groups do not divide."""
    if dtype == FP4_KV:
        return _fp4_cache(name, heads, {"k": head_dim, "v": v_head_dim}, lifetime)
    tensors = (CacheTensor("k", (heads, head_dim), dtype), CacheTensor("v", (heads, v_head_dim), dtype))
    return CacheSpec(name, tensors, lifetime=lifetime)


def _fp4_cache(name: str, heads: int, dims: dict[str, int], lifetime: Lifetime) -> CacheSpec:
    tensors: list[CacheTensor] = []
    for part, dim in dims.items():
        if dim % FP4_GROUP:
            refuse_fp4(FP4_KV, f"heads of {dim} dims are no multiple of {FP4_GROUP}, which share a scale")
        tensors.append(CacheTensor(part, (heads, dim // 2), "uint8"))
        tensors.append(CacheTensor(f"{part}_group_scales", (heads, dim // FP4_GROUP), "uint8"))
    return CacheSpec(name, tuple(tensors), lifetime=lifetime)


def latent_cache(
    name: str,
    dim: int,
    v_dim: int,
    dtype: str,
    entries_per_token: Fraction = Fraction(1),
    lifetime: Lifetime = FULL,
) -> CacheSpec:
    """Returns a cache of one vector [1, dim] an entry, whose first `v_dim` elements are the value."""
    tensors = (CacheTensor("k", (1, dim), dtype), CacheTensor("v", (1, v_dim), dtype, view_of="k"))
    return CacheSpec(name, tensors, entries_per_token, lifetime)


def packed_latent_cache(name: str) -> CacheSpec:
    """Returns a cache of the bytes [1, 656] of a latent of 512 dims and a rotary key of 64, as e4m3 and bfloat16."""
    return CacheSpec(name, (CacheTensor("k", (1, PACKED_LATENT_BYTES), "uint8"),))


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The heads of one attention call site, on one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True)
class AttentionSite:
    """The properties that call sites must have in common for one plan of a step to serve them. `window` 0: all tokens.
    `top_k` > 0: the number of them that an indexer selects. `dcp_size`: as in CacheSpec. `chunked`: as in Window."""

    shape: AttentionShape
    window: int = 0
    top_k: int = 0
    dcp_size: int = 1
    chunked: bool = False

    @property
    def gathered(self) -> AttentionShape:
        """The heads of all ranks that share out the tokens: each of them attends with these to its own tokens."""
        return replace(self.shape, num_heads=self.shape.num_heads * self.dcp_size)

    @property
    def lifetime(self) -> Full | Window:
        """Lifetime of the cache entries that the site reads."""
        return Window(self.window, self.chunked) if self.window else FULL


@dataclass(frozen=True, slots=True)
class Matrix:
    """Weights [rows, cols] of one rank that one product takes.

    `name`: of the module in the layer, as the family's WeightMap has it ("attn.qkv"); `parts` of it are stacked by rows
    ("q", "k", "v"). What the checkpoint calls them decides the scheme. `experts`: as many of them in one tensor (0: no
    experts). With `quantized` False they stay in 16 bits (or `dtype`) whatever the checkpoint's rules say of the name.
    """

    name: str
    parts: tuple[str, ...]
    rows: int
    cols: int
    bias: bool = False
    experts: int = 0
    quantized: bool = True
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class Elements:
    """Parameters that no product takes as a matrix: norms, sinks, tables. `dtype` None: the model's."""

    count: int
    dtype: str | None = None


Weights = tuple[Matrix | Elements, ...]


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """The choices of the user that the ops of a layer depend on."""

    dtype: str
    kv_dtype: str
    page_size: int = 1
    tp_size: int = 1
    state_dtype: str = ""  # of recurrent states; empty: as the model says
    ep_size: int = 1
    pp_size: int = 1
    dcp_size: int = 1
    attn_dp_size: int = 1
    dp_lm_head: bool = False
    quantized_sums: str = "off"  # as --enable-quantized-all-reduce
    two_batch: str = "off"  # whether steps with prompts run as two halves: auto (where that is predicted to gain), on
    library_prompts: bool = False  # whether a library's kernel computes long prompts, which times are predicted of
    library_latents: bool = False  # and whether long prompts over latents
    sgl_kernel_experts: bool = False  # and whether sgl-kernel has the experts' products

    @property
    def ranks(self) -> RankLayout:
        return RankLayout(self.tp_size, self.ep_size, self.pp_size, self.dcp_size, self.attn_dp_size, self.dp_lm_head)

    @property
    def attn_tp_size(self) -> int:
        return self.ranks.attn_tp_size

    def need(
        self,
        op: str,
        dims: tuple[int, int],
        traits: Collection[str] = (),
        heads: tuple[int, int] = (0, 0),
        rotary_dim: int = 0,
    ) -> Need:
        """Returns the need of an op that reads or writes a cache. `dims`: elements of a head of the keys, and of the
        values."""
        return Need(
            op,
            dims[0],
            dims[1],
            self.dtype,
            self.kv_dtype,
            self.page_size,
            traits=frozenset(traits),
            heads=heads,
            rotary_dim=rotary_dim,
        )


def dcp_sharded(cache: CacheSpec, dcp_size: int) -> CacheSpec:
    """Returns the cache of a rank where `dcp_size` ranks share out its tokens."""
    if dcp_size == 1:
        return cache
    return replace(cache, entries_per_token=cache.entries_per_token / dcp_size, dcp_size=dcp_size)


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """x + a causal convolution of x over `taps` tokens, channel by channel (Inkling). A request keeps what came in of
    its last `kept` tokens: taps - 1, and `window_slack` more where tokens may be computed again (drafts that lag)."""

    taps: int
    channels: int
    window_slack: int = 0

    @property
    def kept(self) -> int:
        return self.taps - 1 + self.window_slack

    def rows(self, name: str, dtype: str) -> CacheTensor:
        """Returns what a request keeps, of position p at p % kept."""
        return CacheTensor(name, (self.kept, self.channels), dtype)

    def weights(self) -> Elements:
        return Elements(self.taps * self.channels)


class Mixer(Protocol):
    """The block of a layer in which the tokens of a request see each other."""

    @property
    def num_heads(self) -> int:
        """Heads of the whole model: ranks share them out."""

    @property
    def value_dim(self) -> int:
        """Elements of a head's output, as decoding makes it."""

    @property
    def rope(self) -> RopeSpec | None:
        """The rotation of positions; layers with equal rotations share a table."""

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]:
        """Yields the needs in the order in which a step runs them; without the linear layers, which follow from the
        weights."""

    def caches(self, parallel: ParallelConfig) -> tuple[CacheSpec, ...]: ...

    def attention_shape(self, tp_size: int) -> AttentionShape | None:
        """Returns the heads with which decoding attends; None: there is no attention over a cache."""

    def weights(self, hidden_size: int, tp_size: int) -> Weights: ...

    def activation_elements(self, tp_size: int) -> int:
        """Returns the activation elements of one token where the mixer is widest."""


class FeedForward(Protocol):
    """The block of a layer that computes each token alone."""

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]: ...

    def weights(self, hidden_size: int, ranks: RankLayout, expert_rows: int) -> Weights:
        """Returns the weights of the block. `expert_rows`: intermediate dims of its routed experts that the rank has
        room for (`expert_share`)."""

    def activation_elements(self, hidden_size: int, ranks: RankLayout) -> int: ...


class NgramBlock(FeedForward, Protocol):
    """The block before a layer that looks at a token and those before it by their ids, of which it keeps a state."""

    def caches(self, parallel: ParallelConfig) -> tuple[CacheSpec, ...]: ...


def uneven_sizes(*sizes: int) -> frozenset[str]:
    """Returns the trait of needs with sizes that are no powers of two, if one is not."""
    return frozenset({"uneven_sizes"} if any(size & (size - 1) for size in sizes) else ())


@dataclass(frozen=True, slots=True)
class Sum:
    """A residual stream of one vector a token; blocks add to it. With `norms_after` what a block makes is normed before
    it is added, beside the norm before the block; `eps_after` is the epsilon of these norms (0: the model's);
    `fp32_norms`: all have weights in fp32. Without `ffn_norms` feed-forward blocks take the stream as it is, and
    without `mixer_norms` mixers. With `layer_scale` the stream is multiplied by a number at the end of each layer."""

    norms_after: bool = False
    fp32_norms: bool = False
    ffn_norms: bool = True
    mixer_norms: bool = True
    layer_scale: bool = False
    eps_after: float = 0.0

    @property
    def streams(self) -> int:
        return 1

    def intermediate_elements(self, itemsize: int) -> int:
        return 0

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]:
        yield Need("fused_add_rmsnorm", q_dtype=parallel.dtype)

    def weights(self, hidden_size: int) -> Weights:
        norms = Elements(2 * hidden_size if self.norms_after else 0, "float32" if self.fp32_norms else None)
        return (norms, Elements(int(self.layer_scale)))

    def head_weights(self, hidden_size: int) -> Weights:
        return ()


@dataclass(frozen=True, slots=True)
class HyperConnections:
    """A residual stream of `streams` vectors a token; before and after each of the two blocks a learned matrix mixes
    them (arXiv 2409.19606, constrained to be doubly stochastic in DeepSeek-V4)."""

    streams: int
    rounds: int = 20
    """Rounds of Sinkhorn's normalization: columns, then rows and columns in turns."""
    eps: float = 1e-6
    """Number added to what is normalized, and to its sums."""
    mean_head: bool = False
    """Behind the last layer the streams become their mean (GLM-5.3-Flash), and not what a learned matrix makes."""
    lagged: bool = False
    """A block's input is weighed by what the matrix before the block before it made (DeepSeek-V4.1): the first block's
    is the first stream, and behind the last layer the last block's weights make one of the streams."""

    def intermediate_elements(self, itemsize: int) -> int:
        """Returns the elements of a token, of so many bytes, that a stage hands on beside the streams: weights in fp32
        of the streams in the next block's input."""
        return self.streams * max(1, 4 // itemsize) if self.lagged else 0

    @property
    def outputs(self) -> int:
        """Numbers that a block's matrix makes of a token: a weight of each stream before and after the block, and how
        the streams mix."""
        return (2 + self.streams) * self.streams

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]:
        yield Need("hyper_connection", q_dtype=parallel.dtype, traits=uneven_sizes(self.streams))

    def weights(self, hidden_size: int) -> Weights:
        return (Elements(2 * (self.outputs * self.streams * hidden_size + self.outputs + 3), "float32"),)

    def head_weights(self, hidden_size: int) -> Weights:
        """Returns the weights before the final norm, where the streams become one."""
        if self.mean_head or self.lagged:
            return ()
        return (Elements(self.streams * self.streams * hidden_size + self.streams + 1, "float32"),)


@dataclass(frozen=True, slots=True)
class GatedStreams:
    """A residual stream of `streams` vectors a token. Before a block each is normed by itself, and the block takes
    their mean, channel by channel weighted by gates, which a product of `rank` makes of all normed streams; what the
    block makes is added to each stream, times a gate of that stream (Qwen3.8-Flash-Next)."""

    streams: int
    rank: int

    def intermediate_elements(self, itemsize: int) -> int:
        return 0

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]:
        yield Need("gated_streams", q_dtype=parallel.dtype)

    def weights(self, hidden_size: int) -> Weights:
        """Returns the weights around two blocks; the norm of one of the streams is counted as the block's."""
        width = self.streams * hidden_size
        gates = (2 * self.rank + self.streams) * width
        return Elements(2 * gates), Elements(2 * (width - hidden_size), "float32")

    def head_weights(self, hidden_size: int) -> Weights:
        width = self.streams * hidden_size
        return Elements(2 * self.rank * width), Elements(width - hidden_size, "float32")


SUM = Sum()


class Residual(Protocol):
    """The residual stream: how the outputs of blocks add to it from layer to layer (Sum, HyperConnections,
    GatedStreams)."""

    @property
    def streams(self) -> int:
        """Number of vectors a token."""

    def intermediate_elements(self, itemsize: int) -> int:
        """Returns the elements of a token, of so many bytes, that a stage of a pipeline hands on beside the streams."""

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]: ...

    def weights(self, hidden_size: int) -> Weights:
        """Returns the weights of a layer's residual, beside the norm before each of its two blocks."""

    def head_weights(self, hidden_size: int) -> Weights:
        """Returns the weights of the model's residual, which it has once, beside the final norm."""


@dataclass(frozen=True, slots=True)
class Absent:
    """A placeholder for a block that a layer does not have: it is a Mixer and a FeedForward."""

    num_heads: int = 0
    value_dim: int = 0
    rope: None = None

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]:
        yield from ()

    def caches(self, parallel: ParallelConfig) -> tuple[CacheSpec, ...]:
        return ()

    def attention_shape(self, tp_size: int) -> None:
        return None

    def weights(self, *sizes: object) -> Weights:
        return ()

    def activation_elements(self, *sizes: object) -> int:
        return 0


ABSENT = Absent()


BLOCK_ROWS = "block_rows"
"""Name of the cache of a layer whose blocks' outputs are convolved: tensors "mixer" and "ffn"."""
DRAFT_ROWS = "draft_rows"
"""Name of the cache of a draft's layer with features of a request, in the tensor "tail": see
`speculative.draft_depths`."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """`convolution`: of what the mixer and the feed-forward block make, each with weights and a state of its own.
    `tail`: elements of the features in DRAFT_ROWS, which layers of a draft have where requests have states."""

    mixer: Mixer
    ffn: FeedForward
    residual: Residual = SUM
    inputs: FeedForward = ABSENT
    ngrams: NgramBlock = ABSENT
    convolution: ShortConvolution | None = None
    tail: int = 0

    @property
    def on_other_stage(self) -> bool:
        """Returns whether another stage of a pipeline has the layer."""
        return self.mixer == ABSENT and self.ffn == ABSENT

    @property
    def token_blocks(self) -> tuple[FeedForward, ...]:
        """Blocks that a token goes through alone."""
        return (self.ngrams, self.ffn, self.inputs)

    def caches(self, parallel: ParallelConfig) -> tuple[CacheSpec, ...]:
        """Returns the caches of the layer's blocks, on one rank."""
        return (*self.ngrams.caches(parallel), *self.mixer.caches(parallel), *self._convolved(parallel))

    def _convolved(self, parallel: ParallelConfig) -> Iterator[CacheSpec]:
        if self.convolution is not None:
            rows = tuple(self.convolution.rows(block, parallel.dtype) for block in ("mixer", "ffn"))
            yield CacheSpec(BLOCK_ROWS, rows, lifetime=PER_REQUEST)
        if self.tail:
            yield CacheSpec(DRAFT_ROWS, (CacheTensor("tail", (self.tail,), parallel.dtype),), lifetime=PER_REQUEST)

    def weights(self, hidden_size: int, ranks: RankLayout, expert_rows: int) -> Weights:
        """Returns the weights of the layer's blocks."""
        others = (part for block in self.token_blocks for part in block.weights(hidden_size, ranks, expert_rows))
        convolutions = () if self.convolution is None else (self.convolution.weights(),) * 2
        return (*self.mixer.weights(hidden_size, ranks.attn_tp_size), *others, *convolutions)
