"""What block drafts are: rows that become tokens in one pass, heads that correct the draft tokens from left to right,
and convolutions over the rows."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.drafts.form import Form
from sglang.srt.plan.weight_spec import Elements, Matrix, Weights


@dataclass(frozen=True, slots=True)
class Markov:
    """A head that adds to each draft token's logits a bias that depends on the token before it, so that the draft
    tokens of a block fit together (DSpark, arXiv 2607.05147): w2 times the token's row of w1. Both have `rank` columns
    and a row for each token.

    `kind` "vanilla": as it is; "gated": times a gate made of the row's output and the token; "rnn": a state goes from
    draft token to draft token, and the bias is made of it, the token and the row's output. `rows`: of w2, where the
    draft's output head has fewer tokens than the target.
    """

    rank: int
    kind: str = "vanilla"
    rows: int = 0

    def projection(self, hidden_size: int) -> tuple[int, int]:
        """Returns (rows, columns) of the projection that makes the gate, or the state and the bias; (0, 0) without
        one."""
        rank = self.rank
        sizes = {"vanilla": (0, 0), "gated": (rank, hidden_size + rank), "rnn": (3 * rank, 2 * rank + hidden_size)}
        return sizes[self.kind]

    def weights(self, hidden_size: int, vocab_size: int) -> Weights:
        rows, cols = self.projection(hidden_size)
        gate = (Matrix("markov_gate", ("",), rows, cols, True, quantized=False),) if rows else ()
        table = Elements(vocab_size * self.rank)
        return (table, Matrix("markov_w2", ("",), self.rows or vocab_size, self.rank, quantized=False), *gate)


@dataclass(frozen=True, slots=True)
class Domino:
    """A head that adds to each draft token's logits a bias that depends on all tokens before it (Domino, arXiv
    2605.29707; format: the `DominoDraftModel` of SpecForge). A GRU without biases of `state_size` reads the embeddings
    of the last sampled token and of the draft tokens behind it. Its state, beside the row's output, is projected to
    `inner_size`, goes through SiLU and is projected to the vocabulary. The first `first_place` draft tokens are not
    corrected."""

    state_size: int
    inner_size: int
    first_place: int = 0

    def weights(self, hidden_size: int, vocab_size: int) -> Weights:
        gates = 3 * self.state_size
        return (
            Matrix("prefix_gru", ("weight_ih_l0",), gates, hidden_size, quantized=False),
            Matrix("prefix_gru", ("weight_hh_l0",), gates, self.state_size, quantized=False),
            Matrix("embed_proj.0", ("",), self.inner_size, hidden_size + self.state_size, quantized=False),
            Matrix("embed_proj.2", ("",), vocab_size, self.inner_size, quantized=False),
        )


@dataclass(frozen=True, slots=True)
class Selector:
    """A head that chooses one of the `top_k` likeliest tokens at each place (DFlash 2; format: z-lab's
    `DFlash2DraftModel`). It adds to a candidate's logit the product of three vectors of `rank` elements: of the token
    before it, of the candidate, and of the row's output."""

    rank: int
    top_k: int

    def weights(self, hidden_size: int, vocab_size: int) -> Weights:
        projection = Matrix("hidden_projection", ("",), self.rank, hidden_size, quantized=False)
        return (Elements(2 * vocab_size * self.rank), projection)


Head = Markov | Domino | Selector


@dataclass(frozen=True, slots=True)
class Confidence:
    """A head that predicts how likely each draft token is accepted if those before it are (DSpark, arXiv 2607.05147):
    the sigmoid of a product with the row's output and, where `rank` > 0, the row of Markov's w1 for the token before
    the draft token."""

    rank: int = 0

    def size(self, hidden_size: int) -> int:
        """Returns the elements of the head's input."""
        return hidden_size + self.rank

    def weights(self, hidden_size: int) -> Weights:
        return (Elements(self.size(hidden_size) + 1),)


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution over the rows of a block, one before and one behind a layer's block (DFlash 2): row i becomes the
    sum over `taps` rows i, i - 1, ... of the same block. Each channel has a weight of its own times one that a
    projection of row i makes for `group` channels."""

    taps: int
    group: int

    def rows(self, hidden_size: int) -> int:
        """Returns the rows of the projection that makes the weights: before and behind the block, for each tap and
        group."""
        return 2 * self.taps * hidden_size // self.group

    def weights(self, hidden_size: int) -> Weights:
        projection = Matrix("kernel_projection", ("",), self.rows(hidden_size), hidden_size, quantized=False)
        return (projection, Elements(2 * self.taps * hidden_size))


NOWHERE, IN_WINDOWS, EVERYWHERE = "", "windows", "all"
"""In which layers rows of a block see those before them alone: none, those with a window, all."""


@dataclass(frozen=True, slots=True)
class Block(Form):
    """A DFlash draft: `size` rows of a request, the last sampled token and mask tokens behind it, become tokens in one
    pass (format: z-lab's DFlash). Every layer makes keys and values of the tokens before the block from aux hidden
    states of the target, side by side, projected and normed.

        first_row: the row that proposes the first draft token: 0, or 1 where each mask token proposes the token at its
            own place
        head: corrects the draft tokens from left to right
        convolution: around both blocks of each of the `num_layers` layers
        mask_vector: mask tokens have an embedding of the draft's own, which is in a file beside its weights
        causal: in which layers a row sees those before it, but not those behind it: NOWHERE, IN_WINDOWS or EVERYWHERE
        aux_norms: the aux hidden states of each layer have a norm of their own
        input_norms: layers norm what they make keys and values of as they norm their input
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
    mask_vector: bool = False
    causal: str = NOWHERE
    aux_norms: bool = False
    input_norms: bool = False

    computed_by = "sglang.srt.drafts.block.model:BlockDraft"
    proposed_by = "sglang.srt.drafts.block.drafter:DraftBlock"
    next_tokens_read = 0

    @property
    def rows_a_request(self) -> int:
        return self.size

    def weights(self, hidden_size: int) -> Weights:
        aux = self.num_aux_layers * self.aux_size
        backbone = (Matrix("fc", ("",), hidden_size, aux, quantized=False), Elements(hidden_size))
        head = () if self.head is None else self.head.weights(hidden_size, self.vocab_size)
        convolutions = () if self.convolution is None else self.convolution.weights(hidden_size) * 2 * self.num_layers
        confidence = () if self.confidence is None else self.confidence.weights(hidden_size)
        norms = Elements(hidden_size * self.mask_vector + aux * self.aux_norms)
        return (*backbone, *convolutions, *head, *confidence, norms)
