"""Parts of block drafts beside their layers: heads that correct its draft tokens, and convolutions of its rows."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.plan.layer_spec import Elements, Matrix, Weights


@dataclass(frozen=True, slots=True)
class Markov:
    """A head that adds a bias of the token before each draft token to its logits, so that the draft tokens of a block
    follow from one another (DSpark, arXiv 2607.05147): w2 of the token's row of w1, both of `rank` columns and a row a
    token.

    `kind` "vanilla": as it is; "gated": times a gate made of the row's output and the token; "rnn": a state goes from
    draft token to draft token, and the bias is made of it, the token and the row's output. `rows`: of w2, where the
    draft's output head has fewer tokens than the target.
    """

    rank: int
    kind: str = "vanilla"
    rows: int = 0

    def projection(self, hidden_size: int) -> tuple[int, int]:
        """Returns rows and columns of the product that gates, or makes the state and the bias; (0, 0) without one."""
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
    """A head that adds a bias of all tokens before a draft token to its logits (Domino, arXiv 2605.29707; format: the
    `DominoDraftModel` of SpecForge). A GRU without biases of `state_size` reads the embeddings of the last sampled
    token and of the draft tokens behind it; its state beside the row's output goes through a product to `inner_size`,
    SiLU, and one to the vocabulary. The first `first_place` draft tokens stay as they are.
    """

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
    `DFlash2DraftModel`): to the logit of a candidate it adds the product of three vectors of `rank`, of the token
    before it, of the candidate, and of the row's output.
    """

    rank: int
    top_k: int

    def weights(self, hidden_size: int, vocab_size: int) -> Weights:
        projection = Matrix("hidden_projection", ("",), self.rank, hidden_size, quantized=False)
        return (Elements(2 * vocab_size * self.rank), projection)


Head = Markov | Domino | Selector


@dataclass(frozen=True, slots=True)
class Confidence:
    """A head that says how likely each draft token stands if those before it do (DSpark, arXiv 2607.05147): the sigmoid
    of a product with the row's output and, where `rank` > 0, the row of Markov's w1 of the token before the draft
    token."""

    rank: int = 0

    def size(self, hidden_size: int) -> int:
        return hidden_size + self.rank

    def weights(self, hidden_size: int) -> Weights:
        return (Elements(self.size(hidden_size) + 1),)


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution over the rows of a block, one before and one behind a layer's block (DFlash 2): row i becomes the
    sum over `taps` rows i, i - 1, ... of the same block, each channel times a weight of its own and one that a product
    of row i makes for `group` channels.
    """

    taps: int
    group: int

    def rows(self, hidden_size: int) -> int:
        """Returns the rows of the product that makes the weights: before and behind, of each tap and group."""
        return 2 * self.taps * hidden_size // self.group

    def weights(self, hidden_size: int) -> Weights:
        projection = Matrix("kernel_projection", ("",), self.rows(hidden_size), hidden_size, quantized=False)
        return (projection, Elements(2 * self.taps * hidden_size))
