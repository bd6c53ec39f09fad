"""The description of a draft: layers of its own, what it reads of the target's steps, and how it ends in logits."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.plan.drafts.heads import Confidence, Convolution, Head
from sglang.srt.plan.layer_spec import Elements, HyperConnections, Matrix, Weights
from sglang.srt.plan.model_description import ModelDescription


@dataclass(frozen=True, slots=True)
class Concatenated:
    """A draft of EAGLE-3 (arXiv 2503.01840). Captured residual streams, side by side, are projected to features. The
    first layer's attention takes the normed embedding and the normed features side by side; the features are its
    residual stream.

    `aux_norms`: each aux hidden state is normed before it is projected; `norm_before_fc`: all of them are as one.
    `norm_before_residual`: the normed features are the residual stream. `norm_output`: the next draft step reads the
    output behind the final norm, not before it.
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
    """A draft of EAGLE-1 and 2 (arXiv 2401.15077) or of layers for multi-token prediction (arXiv 2412.19437, section
    2.2): embedding and features side by side are projected to the first layer's input. Features are the target's final
    hidden states.

    `norms`: each of the two is normed before. `hidden_first`: the features stand left of the embedding. `zero_first`:
    the embedding at position 0 is zero. Without `final_norm` the sum of the stream is the output.
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
    """A draft of a model with several residual streams, which has as many (DeepSeek-V4's multi-token prediction): the
    normed and projected embedding is added to each of the target's `streams` behind its last layer, normed and
    projected one by one. The streams behind the draft's layer are the features of the next draft step."""

    streams: int

    num_aux_layers = 1
    final_norm = True
    reads_streams = True

    def weights(self, hidden_size: int) -> Weights:
        projections = (Matrix(name, ("",), hidden_size, hidden_size, quantized=False) for name in ("e_proj", "h_proj"))
        return (*projections, Elements(2 * hidden_size))


@dataclass(frozen=True, slots=True)
class MTPByLayer:
    """A draft of several layers for multi-token prediction (arXiv 2412.19437, section 2.2), each with a projection and
    norms of its own: that of depth d draft tokens the token d + 2 positions behind a row, from the token before it and
    features of the row. Features are the target's residual stream behind its last layer, or with `final_features` its
    final hidden states; with `chained` those of the depths behind the first are the stream behind the layer before.
    `hidden_first`: as in Projected. `depth_norms`: each depth has a norm before the output head. `wide_norms`: weights
    of norms are kept in fp32. `keeps_states`: a request has states, and among them the features that it goes on from.
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
    Features are the target's `streams`, as they are before they become one: normed as one vector, then projected one by
    one; the projected embedding is added to each. They go through the draft's layers, are the features of the next
    guess, and become the hidden state of its logits by gates of rank `rank`, as behind the target's last layer.
    """

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
            Elements(2 * width + hidden_size, "float32"),  # of both norms, and of the one behind the last layer
        )


@dataclass(frozen=True, slots=True)
class Block:
    """A draft of DFlash: `size` rows of a request, the last sampled token and mask tokens behind it, become tokens in
    one pass (format: z-lab's DFlash). Every layer makes keys and values of the tokens before the block from what the
    target's layers made of them: aux hidden states, side by side, projected and normed.

    `first_row`: the row whose output proposes the token behind the last sampled one: 0, or 1 where every mask token
    becomes the token at its own place. `head`: corrects the draft tokens from left to right. `convolution`: around both
    blocks of each of the `num_layers` layers. `confidence`: says how likely draft tokens stand, by which steps are cut.
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
    """A draft without keys and values of its own: its layers attend to those of the target's last layers, which stay as
    they are while it drafts (Gemma 4's assistants; reference: transformers' Gemma4AssistantForCausalLM). The
    embedding of a token and features of the target's width, side by side, are projected to the first layer's input; the
    output is projected back to the features of the next draft token, which begin as the target's final hidden states.

    `groups` > 0: tokens come in so many groups, each with a centroid, and only those of the `kept` likeliest groups are
    drafted. `vocab_size`: tokens of all groups.
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
        return (*projections, centroids, Elements(2 * self.vocab_size, "int32"))  # int64


@dataclass(frozen=True, slots=True)
class Separate:
    """A model of the same vocabulary that reads nothing of the target but its tokens (STANDALONE)."""

    num_aux_layers = 0
    final_norm = True
    reads_streams = False

    def weights(self, hidden_size: int) -> Weights:
        return ()


Form = Concatenated | Projected | ByStream | MTPByLayer | Streamed | Block | Assistant | Separate


@dataclass(frozen=True, slots=True)
class DraftDescription:
    """The description of a draft. `model`: its layers, names, quantization; `kind`: how messages call it ("EAGLE3",
    "MTP").

    `first_layer`: the draft's caches are numbered from there, behind the layers of the target, whose vocabulary has
    `vocab_size` tokens. `aux_layers`: the target layers whose outputs it reads. `head_size`: rows of an output head of
    its own, 0: the target's. `reduced`: these rows stand for the tokens that a table in the checkpoint (d2t) names.
    `own_embedding`: it does not take the target's. `plain_ends`: what it takes of the target's embedding and head is
    what the checkpoint has, without the norm before the first layer and what follows the product with the head.
    `shares_selection`: what an indexer of its layers selects for a row
    of the target's step is read by all passes that follow, which see the tokens since as well. `at`: the beginnings of
    the tensors' names in the target's checkpoint.
    """

    kind: str
    model: ModelDescription
    form: Form
    first_layer: int
    vocab_size: int
    aux_layers: tuple[int, ...] = ()
    head_size: int = 0
    reduced: bool = False
    own_embedding: bool = False
    plain_ends: bool = False
    shares_selection: bool = False
    at: str | tuple[str, ...] = ""

    @property
    def separate(self) -> bool:
        return isinstance(self.form, Separate)

    @property
    def next_tokens_read(self) -> int:
        """Number of tokens behind a position on which the draft's keys and values of it depend, too."""
        if isinstance(self.form, MTPByLayer):
            return self.form.depths
        return 0 if isinstance(self.form, Block | Separate) else 1

    @property
    def tails(self) -> int:
        """Rows of features that are kept for each request from step to step, beside its states."""
        return self.form.depths - 1 if isinstance(self.form, MTPByLayer) and not self.form.keeps_states else 0

    @property
    def rows_a_request(self) -> int:
        """Rows of a request in one pass of the draft."""
        return self.form.size if isinstance(self.form, Block) else 1

    def front(self) -> Weights:
        """Weights that lie before the first layer and behind the last one, except embedding and head."""
        hidden = self.model.hidden_size
        norm = Elements(hidden * self.form.final_norm, "float32" if self.model.zero_centred_norms else None)
        table = Elements(2 * self.head_size * self.reduced, "int32")  # int64
        residual = self.model.layers[0].residual
        ends = residual.head_weights(hidden) if isinstance(residual, HyperConnections) else ()
        return (*self.form.weights(hidden), *ends, norm, table)

    def __str__(self) -> str:
        layers = f"{len(self.model.layers)} layer{'s' * (len(self.model.layers) > 1)}"
        read = f" over the outputs of layers {', '.join(map(str, self.aux_layers))}" if self.aux_layers else ""
        head = f", a head of {self.head_size:,} of {self.vocab_size:,} tokens" if self.reduced else ""
        return f"{self.kind} ({self.model.architecture}): {layers}{read}{head}"
