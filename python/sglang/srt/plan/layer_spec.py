"""The description of a model as layers that say which ops, caches and weights they have. No torch.

`model_description.describe_model` makes the layers of a config.json, once. Needs, memory plan and `explain` follow from
them:

    layer.mixer      mixes the tokens of a request: GQA, MLA, CompressedSparse, GatedDelta, KimiDelta
    layer.ffn        computes each token alone: Dense, MoE
    layer.inputs     adds an embedding of the token in every layer: PerLayerEmbedding, in few families
    layer.ngrams     adds embeddings of the last few tokens before a layer: NgramEmbedding, likewise
    layer.residual   the residual stream: how the blocks' outputs add up
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from sglang.srt.blocks.short_convolution.spec import ShortConvolution
from sglang.srt.configs.rope import RopeSpec
from sglang.srt.kernels.spec import Need
from sglang.srt.plan.block_defaults import FeedForwardDefaults, MixerDefaults
from sglang.srt.plan.cache_spec import FULL, PER_REQUEST, CacheSpec, CacheTensor, Full, Window
from sglang.srt.plan.kv_spec import has_tensor_scales
from sglang.srt.plan.ranks import ONE_RANK, RankLayout
from sglang.srt.plan.weight_spec import Elements, Weights


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The heads of one attention call site, on one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True)
class AttentionSite:
    """An attention site: the properties that attention layers must have in common for one plan of a step to serve them.
    (The groups of --attn-dp-size are something else.) `window` 0: all tokens. `top_k` > 0: the number of tokens that an
    indexer selects. `dcp_size`: as in CacheSpec. `chunked`: as in Window."""

    shape: AttentionShape
    window: int = 0
    top_k: int = 0
    dcp_size: int = 1
    chunked: bool = False

    @property
    def gathered(self) -> AttentionShape:
        """The query heads of all DCP ranks together: each rank attends with all of them to its own tokens."""
        return replace(self.shape, num_heads=self.shape.num_heads * self.dcp_size)

    @property
    def lifetime(self) -> Full | Window:
        """Lifetime of the cache entries that the site reads."""
        return Window(self.window, self.chunked) if self.window else FULL


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """The layout of ranks and the dtypes, chosen by the user, that the ops of a layer depend on."""

    dtype: str
    kv_dtype: str
    page_size: int = 1
    ranks: RankLayout = ONE_RANK
    state_dtype: str = ""  # dtype of recurrent states; empty: the model's
    quantized_sums: str = "off"  # as --enable-quantized-all-reduce
    two_batch: str = "off"  # two-batch overlap of steps with prompts: off, auto (where a gain is predicted), on
    # The last three only matter for predicted times.
    library_prompts: bool = False  # a library's kernel computes long prompts
    library_latents: bool = False  # a library's kernel computes long prompts over latents
    sgl_kernel_experts: bool = False  # sgl-kernel computes the experts' products

    @property
    def attn_tp_size(self) -> int:
        return self.ranks.attn_tp_size

    @property
    def unquantized(self) -> ParallelConfig:
        """The config with a cache in the model's dtype: of kernels whose rows another kernel packs."""
        return replace(self, kv_dtype=self.dtype)

    @property
    def of_index_keys(self) -> ParallelConfig:
        """The config with the cache dtype of an indexer's keys: e4m3 beside entries in eight or in four bits."""
        return replace(self, kv_dtype="fp8_e4m3") if has_tensor_scales(self.kv_dtype) else self

    def need(
        self,
        op: str,
        dims: tuple[int, int],
        traits: Collection[str] = (),
        heads: tuple[int, int] = (0, 0),
        rotary_dim: int = 0,
    ) -> Need:
        """Returns the need of an op that reads or writes a cache. `dims`: elements of a head's key and of its value."""
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


class Mixer(MixerDefaults, Protocol):
    """The block of a layer in which the tokens of a request see each other."""

    @property
    def num_heads(self) -> int:
        """Heads of the whole model, before they are divided over ranks."""

    @property
    def value_dim(self) -> int:
        """Elements of a head's output when decoding."""

    @property
    def rope(self) -> RopeSpec | None:
        """The rotary embedding; layers with equal ones share a table."""

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]:
        """Yields the needs in the order in which a step runs them, without the linear layers, which follow from the
        weights."""

    def caches(self, parallel: ParallelConfig) -> tuple[CacheSpec, ...]: ...

    def weights(self, hidden_size: int, tp_size: int) -> Weights: ...

    def activation_elements(self, tp_size: int) -> int:
        """Returns the activation elements of one token at the mixer's widest point."""


class FeedForward(FeedForwardDefaults, Protocol):
    """The block of a layer that computes each token alone."""

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]: ...

    def weights(self, hidden_size: int, ranks: RankLayout, expert_rows: int) -> Weights:
        """Returns the weights of the block on one rank. `expert_rows`: intermediate dims of a routed expert for which
        the rank has room (`rank_weights.expert_rows`)."""

    def activation_elements(self, hidden_size: int, ranks: RankLayout) -> int: ...


class NgramBlock(FeedForward, Protocol):
    """A block before a layer that adds embeddings of n-grams: it reads the ids of a token and of those before it, which
    it keeps as a state of the request."""

    def caches(self, parallel: ParallelConfig) -> tuple[CacheSpec, ...]: ...


def needs_of_parts(parallel: ParallelConfig) -> Iterator[Need]:
    """Yields the needs of DCP ranks, which attend to their own tokens and then merge their partial results."""
    for op in ("pack_parts", "merge_parts"):
        yield Need(op, q_dtype=parallel.dtype)


def uneven_sizes(*sizes: int) -> frozenset[str]:
    """Returns the trait "uneven_sizes" if one of the sizes is no power of two, else nothing."""
    return frozenset({"uneven_sizes"} if any(size & (size - 1) for size in sizes) else ())


class ResidualDefaults(Protocol):
    """A residual stream for which the norm behind a block cannot sum the block's outputs over ranks."""

    __slots__ = ()

    @property
    def defers_all_reduce(self) -> bool:
        """Returns whether all-reduces may be deferred to the norm behind a block: nothing else comes before it."""
        return False

    @property
    def mixer_norms(self) -> bool:
        """Returns whether mixers take the stream normed."""
        return True

    @property
    def norms_apart(self) -> bool:
        """Returns whether the norms before blocks and the final one are besides the weights that blocks name."""
        return True

    def intermediate_elements(self, itemsize: int) -> int:
        """Returns the elements of a token, of `itemsize` bytes each, that a pipeline stage sends on besides the
        streams."""
        return 0

    def head_weights(self, hidden_size: int) -> Weights:
        """Returns the weights that the residual has once in the model, besides the final norm."""
        return ()


@dataclass(frozen=True, slots=True)
class Sum(ResidualDefaults):
    """A residual stream of one vector a token, to which the blocks' outputs are added.

    norms_after: a block's output is normed before it is added, besides the norm before the block
    fp32_norms: the weights of these norms are fp32
    ffn_norms, mixer_norms: False: such blocks take the stream without a norm
    layer_scale: a stored number multiplies the stream at the end of each layer
    eps_after: epsilon of the norms after blocks; 0: the model's
    """

    norms_after: bool = False
    fp32_norms: bool = False
    ffn_norms: bool = True
    mixer_norms: bool = True
    layer_scale: bool = False
    eps_after: float = 0.0

    @property
    def streams(self) -> int:
        return 1

    @property
    def defers_all_reduce(self) -> bool:
        return not self.norms_after and not self.layer_scale

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]:
        yield Need("fused_add_rmsnorm", q_dtype=parallel.dtype)

    def weights(self, hidden_size: int) -> Weights:
        norms = Elements(2 * hidden_size if self.norms_after else 0, "float32" if self.fp32_norms else None)
        return (norms, Elements(int(self.layer_scale)))


SUM = Sum()


class Residual(ResidualDefaults, Protocol):
    """The residual stream: how the blocks' outputs add up from layer to layer (Sum, HyperConnections, GatedStreams,
    GatedSum)."""

    @property
    def streams(self) -> int:
        """Number of vectors of a token."""

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]: ...

    def weights(self, hidden_size: int) -> Weights:
        """Returns the weights of one layer's residual, besides the norm before each of its two blocks."""


@dataclass(frozen=True, slots=True)
class Absent(MixerDefaults, FeedForwardDefaults):
    """A placeholder for a block that a layer does not have: it is a Mixer and a FeedForward."""

    num_heads: int = 0
    value_dim: int = 0
    rope: None = None

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]:
        yield from ()

    def caches(self, parallel: ParallelConfig) -> tuple[CacheSpec, ...]:
        return ()

    def weights(self, *sizes: object) -> Weights:
        return ()

    def activation_elements(self, *sizes: object) -> int:
        return 0


ABSENT = Absent()


BLOCK_ROWS = "block_rows"
"""Name of the cache of a layer whose blocks' outputs are convolved: tensors "mixer" and "ffn"."""
DRAFT_ROWS = "draft_rows"
"""Name of the cache of a draft's layer that keeps features of a request, in the tensor "tail" (`MTPByLayer`)."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer of a model: its blocks and its residual stream.

    convolution: applied to the mixer's and to the feed-forward block's output, each with weights and a state of its
        own
    tail: elements of the features in DRAFT_ROWS, which draft layers have where requests have states
    """

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
        """The blocks that compute each token alone."""
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
        """Returns the weights of the layer's blocks on one rank, without the residual's."""
        others = (part for block in self.token_blocks for part in block.weights(hidden_size, ranks, expert_rows))
        convolutions = () if self.convolution is None else (self.convolution.weights(),) * 2
        return (*self.mixer.weights(hidden_size, ranks.attn_tp_size), *others, *convolutions)
