"""Forms of drafts: what each reads of its target, and the weights that it has besides its layers."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.plan.drafts.heads import Confidence, Convolution, Head
from sglang.srt.plan.layer_spec import Elements, Matrix, Weights


@dataclass(frozen=True, slots=True)
class Concatenated:
    """An EAGLE-3 draft (arXiv 2503.01840). Aux hidden states of the target, side by side, are projected to features.
    The first layer's attention takes the normed embedding and the normed features side by side; the features are its
    residual stream.

        aux_norms: each aux hidden state is normed before the projection; norm_before_fc: all of them together
        norm_before_residual: the normed features are the residual stream
        norm_output: the next draft step reads the output behind the final norm, not before it
    """

    num_aux_layers: int
    aux_size: int
    aux_norms: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False

    final_norm = True
    reads_streams = False

    @property
    def total_aux_size(self) -> int:
        return self.num_aux_layers * self.aux_size

    def weights(self, hidden_size: int) -> Weights:
        norms = self.total_aux_size * (self.aux_norms + self.norm_before_fc) + hidden_size  # the features' norm
        return (Matrix("fc", ("",), hidden_size, self.total_aux_size, quantized=False), Elements(norms))


@dataclass(frozen=True, slots=True)
class Projected:
    """A draft of EAGLE-1 and 2 (arXiv 2401.15077) or of one layer for multi-token prediction (arXiv 2412.19437, section
    2.2): embedding and features side by side are projected to the first layer's input. Features are the target's final
    hidden states.

        norms: both are normed before the projection
        hidden_first: the features are left of the embedding
        zero_first: the embedding at position 0 is zero
        final_norm: False: the residual stream is the output, without a norm
    """

    norms: bool = True
    hidden_first: bool = False
    zero_first: bool = False
    bias: bool = False
    final_norm: bool = True
    num_aux_layers = 0
    reads_streams = False

    def weights(self, hidden_size: int) -> Weights:
        projection = Matrix("fc", ("",), hidden_size, 2 * hidden_size, self.bias, quantized=False)
        return (projection, Elements(2 * hidden_size * self.norms))


@dataclass(frozen=True, slots=True)
class ByStream:
    """A draft of a model with several residual streams, with as many itself (DeepSeek-V4's multi-token prediction).
    Each of the target's `streams` behind its last layer is normed and projected, and the normed and projected embedding
    is added to it. The streams behind the draft's layer are the features of the next draft step."""

    streams: int

    num_aux_layers = 1
    final_norm = True
    reads_streams = True

    def weights(self, hidden_size: int) -> Weights:
        projections = (Matrix(name, ("",), hidden_size, hidden_size, quantized=False) for name in ("e_proj", "h_proj"))
        return (*projections, Elements(2 * hidden_size))


@dataclass(frozen=True, slots=True)
class MTPByLayer:
    """A draft of several layers for multi-token prediction (arXiv 2412.19437, section 2.2), each with its own
    projection and norms. The layer of depth d drafts the token d + 2 positions behind a row, from the token before that
    and features of the row. Features are the target's residual stream behind its last layer.

        final_features: features are the target's final hidden states instead
        chained: features of later depths are the stream behind the previous depth's layer
        hidden_first: as in Projected
        depth_norms: each depth has a norm before the output head
        wide_norms: weights of norms are kept in fp32
        keeps_states: a request has states, which include the features from which it continues
    """

    depths: int
    chained: bool = False
    final_features: bool = False
    hidden_first: bool = False
    depth_norms: bool = True
    wide_norms: bool = False
    keeps_states: bool = False

    final_norm = False
    reads_streams = False

    @property
    def num_aux_layers(self) -> int:
        return 0 if self.final_features else 1

    def weights(self, hidden_size: int) -> Weights:
        norms = Elements((2 + self.depth_norms) * hidden_size, "float32" if self.wide_norms else None)
        one = (Matrix("fc", ("",), hidden_size, 2 * hidden_size, quantized=False), norms)
        return one * self.depths


@dataclass(frozen=True, slots=True)
class Streamed:
    """A draft of layers for multi-token prediction in a model with gated residual streams (Qwen3.8-Flash-Next).
    Features are the target's `streams` before they become one: normed as one vector, then projected one by one; the
    projected embedding is added to each. Behind the draft's layers they are the features of the next draft token, and
    gates of rank `rank` make them the hidden state for logits, as behind the target's last layer."""

    streams: int
    rank: int

    num_aux_layers = 1
    final_norm = False
    reads_streams = True

    def weights(self, hidden_size: int) -> Weights:
        width = self.streams * hidden_size
        return (
            Matrix("fc_embedding", ("",), hidden_size, hidden_size, quantized=False),
            Matrix("fc_hidden", ("",), hidden_size, hidden_size, quantized=False),
            Elements(2 * self.rank * width),
            Elements(2 * width + hidden_size, "float32"),  # both norms, and the one behind the last layer
        )


@dataclass(frozen=True, slots=True)
class Block:
    """A DFlash draft: `size` rows of a request, the last sampled token and mask tokens behind it, become tokens in one
    pass (format: z-lab's DFlash). Every layer makes keys and values of the tokens before the block from aux hidden
    states of the target, side by side, projected and normed.

        first_row: the row that proposes the first draft token: 0, or 1 where each mask token proposes the token at its
            own place
        head: corrects the draft tokens from left to right
        convolution: around both blocks of each of the `num_layers` layers
        confidence: predicts how likely draft tokens are accepted, by which steps are shortened
    """

    num_aux_layers: int
    aux_size: int
    size: int
    mask_token: int
    vocab_size: int
    first_row: int = 1
    head: Head | None = None
    convolution: Convolution | None = None
    num_layers: int = 0
    confidence: Confidence | None = None

    final_norm = True
    reads_streams = False

    @property
    def num_speculative_tokens(self) -> int:
        """Number of draft tokens that a block makes."""
        return self.size - self.first_row

    def weights(self, hidden_size: int) -> Weights:
        aux = self.num_aux_layers * self.aux_size
        backbone = (Matrix("fc", ("",), hidden_size, aux, quantized=False), Elements(hidden_size))
        head = () if self.head is None else self.head.weights(hidden_size, self.vocab_size)
        convolutions = () if self.convolution is None else self.convolution.weights(hidden_size) * 2 * self.num_layers
        confidence = () if self.confidence is None else self.confidence.weights(hidden_size)
        return (*backbone, *convolutions, *head, *confidence)


@dataclass(frozen=True, slots=True)
class Assistant:
    """A draft without keys and values of its own: its layers attend to those of the target's last layers, which do not
    change while it drafts (Gemma 4's assistants; reference: transformers' Gemma4AssistantForCausalLM). A token's
    embedding and features, both of the target's width, are projected side by side to the first layer's input. The
    output is projected back to the features of the next draft token; the first features are the target's final hidden
    states.

    `groups` > 0: tokens are divided into that many groups, each with a centroid, and only tokens of the `kept`
    likeliest groups are drafted. `vocab_size`: tokens of all groups.
    """

    feature_size: int
    groups: int = 0
    kept: int = 0
    vocab_size: int = 0

    num_aux_layers = 0
    final_norm = True
    reads_streams = False

    def weights(self, hidden_size: int) -> Weights:
        projections = (
            Matrix("fc", ("",), hidden_size, 2 * self.feature_size, quantized=False),
            Matrix("back", ("",), self.feature_size, hidden_size, quantized=False),
        )
        if not self.groups:
            return projections
        centroids = Matrix("centroids", ("",), self.groups, hidden_size, quantized=False)
        return (*projections, centroids, Elements(2 * self.vocab_size, "int32"))  # a table of int64


@dataclass(frozen=True, slots=True)
class Separate:
    """A draft model of the same vocabulary that reads nothing of the target but its tokens (STANDALONE)."""

    num_aux_layers = 0
    final_norm = True
    reads_streams = False

    def weights(self, hidden_size: int) -> Weights:
        return ()


Form = Concatenated | Projected | ByStream | MTPByLayer | Streamed | Block | Assistant | Separate
