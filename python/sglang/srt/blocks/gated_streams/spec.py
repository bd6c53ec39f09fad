"""A residual stream of several vectors a token with gates, as a residual of `layer_spec`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sglang.srt.kernels.spec import Need
from sglang.srt.plan.layer_spec import ParallelConfig, ResidualDefaults
from sglang.srt.plan.weight_spec import Elements, Weights


@dataclass(frozen=True, slots=True)
class GatedStreams(ResidualDefaults):
    """A residual stream of `streams` vectors a token (Qwen3.8-Flash-Next). Each is normed by itself; the block's input
    is their mean, weighted channel by channel by gates that a product of rank `rank` makes of all normed streams. The
    block's output is added to each stream, times that stream's gate."""

    streams: int
    rank: int

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]:
        yield Need("gated_streams", q_dtype=parallel.dtype)

    def weights(self, hidden_size: int) -> Weights:
        """Returns the weights around a layer's two blocks; the norm of the first stream is counted as the block's."""
        width = self.streams * hidden_size
        gates = (2 * self.rank + self.streams) * width
        return Elements(2 * gates), Elements(2 * (width - hidden_size), "float32")

    def head_weights(self, hidden_size: int) -> Weights:
        width = self.streams * hidden_size
        return Elements(2 * self.rank * width), Elements(width - hidden_size, "float32")
