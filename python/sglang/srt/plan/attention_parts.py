"""Parts of attention that some models have and others do not: small values of which mixers are made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from sglang.srt.blocks.short_convolution.spec import ShortConvolution
from sglang.srt.kernels.spec import Need
from sglang.srt.plan.block_defaults import HeadDims
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.weight_spec import Elements, Matrix, Weights


@dataclass(frozen=True, slots=True)
class AttentionTemperature:
    """Attention temperature scaling: multiplies the queries at position p by 1 + scale * ln(1 + floor((p + offset) /
    length)); with `smooth` by 1 + scale * ln((p + offset) / length) where that is above 1."""

    scale: float
    length: int
    offset: int = 0
    smooth: bool = False


@dataclass(frozen=True, slots=True)
class RelativeBias:
    """Scores of keys at distances below `extent` get a learned bias by distance, made of `dims` numbers of each head
    and token. The attention temperature multiplies it, too."""

    dims: int
    extent: int

    @property
    def elements(self) -> int:
        """Numbers of a head and token: those of which biases are made, and the biases."""
        return self.dims + self.extent

    def weights(self, heads: int, input_size: int) -> Weights:
        rows = Matrix("attn.relative", ("",), heads * self.dims, input_size, quantized=False)
        return (rows, Elements(self.dims * self.extent))


@dataclass(frozen=True, slots=True)
class PerHead:
    """A norm over each head of q and of k. `fp32`: its weights are fp32."""

    fp32: bool = False

    def weights(self, head_dim: int, q_rows: int, k_rows: int) -> Elements:
        return Elements(head_dim * ((q_rows > 0) + (k_rows > 0)), "float32" if self.fp32 else None)


@dataclass(frozen=True, slots=True)
class Unweighted:
    """A norm over each head of q and of k, without weights."""

    def weights(self, head_dim: int, q_rows: int, k_rows: int) -> Elements:
        return Elements(0)


@dataclass(frozen=True, slots=True)
class Whole:
    """A norm over all of q, and one over all of k."""

    def weights(self, head_dim: int, q_rows: int, k_rows: int) -> Elements:
        return Elements(q_rows + k_rows)


QKNorm = PerHead | Unweighted | Whole


@dataclass(frozen=True, slots=True)
class ElementGate:
    """A sigmoid gate for every element of the output. q_proj makes it, or with `own_projection` a projection of its
    own. `normed`: each head of the output is normed before, without weights."""

    own_projection: bool = False
    normed: bool = False

    @property
    def op(self) -> str:
        return "gated_rmsnorm" if self.normed else "attention_output_gate"

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]:
        yield Need(self.op, q_dtype=parallel.dtype)

    def head_dims(self, v_head_dim: int) -> Iterator[HeadDims]:
        if self.own_projection:
            yield HeadDims("attn.qkv", ("gate",), 0, v_head_dim)

    def weights(self, heads: int, input_size: int) -> Weights:
        """Returns the weights apart from those of q, k and v."""
        return ()


@dataclass(frozen=True, slots=True)
class HeadGate:
    """A gate for each head of the output: a sigmoid, or with `softplus` a softplus."""

    softplus: bool = False
    op: ClassVar[str] = "attention_head_gate"

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]:
        if not self.softplus:
            yield Need(self.op, q_dtype=parallel.dtype)

    def head_dims(self, v_head_dim: int) -> Iterator[HeadDims]:
        yield HeadDims("attn.head_gate", ("",), 0, 1)

    def weights(self, heads: int, input_size: int) -> Weights:
        return (Matrix("attn.head_gate", ("",), heads, input_size, quantized=False),)


Gate = ElementGate | HeadGate


@dataclass(frozen=True, slots=True)
class LatentNorms:
    """The norms of latents.

    eps: their epsilon, which in most models is not the one of the layers' norms
    scaled: a normed latent is multiplied by the root of hidden size over its own size
    rotary_key: the rotary key is normed, too
    """

    eps: float = 1e-6
    scaled: bool = False
    rotary_key: bool = False

    def factor(self, hidden_size: int, size: int) -> float:
        """Returns the number by which a normed latent of `size` elements is multiplied."""
        return float((hidden_size / size) ** 0.5) if self.scaled else 1.0

    def weights(self, latents: int, rope_dim: int) -> Weights:
        """Returns the weights. They hold the factor; fp32 does not round their product with it."""
        key = (Elements(rope_dim),) if self.rotary_key else ()
        return (Elements(latents, "float32" if self.scaled else None), *key)


PLAIN_LATENT_NORMS = LatentNorms()


@dataclass(frozen=True, slots=True)
class Values:
    """What values are.

    dim: elements of a head; 0: as many as keys have
    from_keys: k_proj makes both: v is k before its norm
    norm: each head is normed, without weights
    scale: multiplies v
    """

    dim: int = 0
    from_keys: bool = False
    norm: bool = False
    scale: float = 1.0


PLAIN_VALUES = Values()


@dataclass(frozen=True, slots=True)
class OwnCache:
    """The layer caches keys and values. `shared`: later layers attend to them, too."""

    shared: bool = False

    def source(self, layer: int) -> int:
        """Returns the layer whose keys and values layer number `layer` reads."""
        return layer


OWN_CACHE = OwnCache()


@dataclass(frozen=True, slots=True)
class CacheOfLayer:
    """The layer has no keys and values of its own and attends to those of layer number `layer`."""

    layer: int

    def source(self, layer: int) -> int:
        """Returns the layer whose keys and values layer number `layer` reads."""
        return self.layer


@dataclass(frozen=True, slots=True)
class Softmax:
    """How products of queries and keys become the weights of values.

    scale: multiplies the products; 0: head_dim ** -0.5
    logit_cap: > 0 caps the scores softly to within +-logit_cap
    sinks: a learned logit of each head takes part, without a value
    relative_bias: is added to the scores
    """

    scale: float = 0.0
    logit_cap: float = 0.0
    sinks: bool = False
    relative_bias: RelativeBias | None = None

    @property
    def traits(self) -> tuple[str, ...]:
        """Traits of the needs of attention."""
        here = {
            "sinks": self.sinks,
            "logit_cap": self.logit_cap > 0,
            "relative_bias": self.relative_bias is not None,
        }
        return tuple(trait for trait, present in here.items() if present)

    @property
    def extent(self) -> int:
        """Distances that have a bias."""
        return 0 if self.relative_bias is None else self.relative_bias.extent

    def weights(self, heads: int, input_size: int) -> Weights:
        biases = () if self.relative_bias is None else self.relative_bias.weights(heads, input_size)
        return (*biases, Elements(heads if self.sinks else 0, "float32"))


PLAIN_SOFTMAX = Softmax()


@dataclass(frozen=True, slots=True)
class Biases:
    """Biases of the linear layers: of q, k and v, and of the output."""

    qkv: bool = False
    output: bool = False


NO_BIASES = Biases()


@dataclass(frozen=True, slots=True)
class StoredQKV:
    """How the checkpoint stores q, k and v.

    tp_blocks: > 0: as one TP-interleaved tensor (`fused_rows`)
    scale_rows: contiguous rows that share quantization scales
    """

    tp_blocks: int = 0
    scale_rows: int = 1


APART = StoredQKV()


@dataclass(frozen=True, slots=True)
class KVConvolution:
    """k and v are convolved over `taps` tokens before the norm of k. `window_slack`: as in ShortConvolution."""

    taps: int
    window_slack: int = 0

    def over(self, channels: int) -> ShortConvolution:
        """Returns the convolution over a rank's k and v, which have `channels` elements together."""
        return ShortConvolution(self.taps, channels, self.window_slack)
