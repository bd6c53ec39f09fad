"""A weighted residual sum, as a residual of `layer_spec`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sglang.srt.kernels.spec import Need
from sglang.srt.plan.layer_spec import ParallelConfig, ResidualDefaults
from sglang.srt.plan.weight_spec import Elements, Weights


@dataclass(frozen=True, slots=True)
class GatedSum(ResidualDefaults):
    """A residual stream of one vector a token (Muse-Spark). A block's output is normed, with epsilon `eps_after`; that
    of a feed-forward block is multiplied by a weight before. Each channel of the stream becomes a times itself plus b
    times that of the output. b is the sigmoid of a stored number divided by `temperature`, and a keeps the variance:
    sqrt(1 - b * b), at least sqrt(0.001)."""

    temperature: float
    eps_after: float

    @property
    def streams(self) -> int:
        return 1

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]:
        yield Need("gated_sum", q_dtype=parallel.dtype)

    def weights(self, hidden_size: int) -> Weights:
        """Returns the gates of a layer's two blocks, and the weight of one output's norm."""
        return (Elements(3 * hidden_size, "float32"),)
