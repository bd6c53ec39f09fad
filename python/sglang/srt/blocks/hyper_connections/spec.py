"""A residual stream of several vectors a token that learned matrices mix, as a residual of `layer_spec`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sglang.srt.kernels.spec import Need
from sglang.srt.plan.layer_spec import ParallelConfig, ResidualDefaults, uneven_sizes
from sglang.srt.plan.weight_spec import Elements, Weights


@dataclass(frozen=True, slots=True)
class HyperConnections(ResidualDefaults):
    """A residual stream of `streams` vectors a token; before and after each of the two blocks a learned matrix mixes
    them (arXiv 2409.19606, constrained to be doubly stochastic in DeepSeek-V4)."""

    streams: int
    rounds: int = 20
    """Rounds of Sinkhorn's normalization: columns first, then alternately rows and columns. 0: the streams do not mix;
    a block's output is added to each (Hy4)."""
    eps: float = 1e-6
    """Number added to the elements before normalization, and to their sums."""
    mean_head: bool = False
    """True: behind the last layer the streams are averaged (GLM-5.3-Flash) instead of being mixed by a learned
    matrix."""
    lagged: bool = False
    """True: a block's input is weighted by the output of the previous block's matrix (DeepSeek-V4.1). The first block's
    input is the first stream, and the last block's weights make the input of the final norm."""
    magnitude: float = 2.0
    """Limit of a block's weights in the streams."""

    def intermediate_elements(self, itemsize: int) -> int:
        """Returns the elements of a token, of `itemsize` bytes each, that a pipeline stage sends besides the streams:
        the fp32 weights of the streams in the next block's input."""
        return self.streams * max(1, 4 // itemsize) if self.lagged else 0

    @property
    def outputs(self) -> int:
        """Number of outputs of a block's matrix for each token: a weight of each stream before and after the block, and
        the matrix that mixes the streams."""
        return sum(self.pieces)

    @property
    def pieces(self) -> tuple[int, ...]:
        """Sizes of the groups of these outputs that have a scale of their own."""
        return (self.streams, self.streams, *([self.streams**2] if self.rounds else []))

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]:
        yield Need("hyper_connection", q_dtype=parallel.dtype, traits=uneven_sizes(self.streams))

    def weights(self, hidden_size: int) -> Weights:
        return (Elements(2 * (self.outputs * self.streams * hidden_size + self.outputs + len(self.pieces)), "float32"),)

    def head_weights(self, hidden_size: int) -> Weights:
        """Returns the weights that make one stream of all, before the final norm."""
        if self.mean_head or self.lagged:
            return ()
        return (Elements(self.streams * self.streams * hidden_size + self.streams + 1, "float32"),)
