"""Embeddings of a token that are added in every layer, as a block of `layer_spec` (Gemma 4: per-layer inputs)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.configs.activation import Activation
from sglang.srt.kernels.spec import Need
from sglang.srt.plan.block_defaults import FeedForwardDefaults
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.ranks import RankLayout
from sglang.srt.plan.weight_spec import Elements, Matrix, Weights

if TYPE_CHECKING:
    from typing import Self


@dataclass(frozen=True, slots=True)
class PerLayerEmbedding(FeedForwardDefaults):
    """An embedding of `size` numbers for each of `num_layers` layers: looked up in a table of `vocab_size` rows, plus a
    projection of the token's embedding. At the end of a layer the stream gates them, and they are projected into it.
    on_host: the table lies in pinned host memory."""

    size: int
    num_layers: int
    vocab_size: int
    activation: Activation
    on_host: bool = False

    @property
    def per_layer(self) -> Self:
        return self

    @property
    def stream_elements(self) -> int:
        """Elements that one token carries through the layers; twice the embedding's, because that is what making it
        takes."""
        return 2 * self.num_layers * self.size

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]:
        yield Need(self.activation.op, q_dtype=parallel.dtype)

    def weights(self, hidden_size: int, ranks: RankLayout, expert_rows: int) -> Weights:
        """Returns the weights of one layer, which every rank has whole."""
        return (
            Matrix("inputs.gate", ("",), self.size, hidden_size),
            Matrix("inputs.projection", ("",), hidden_size, self.size),
            Elements(hidden_size),
        )

    def model_weights(self, hidden_size: int, tp_size: int) -> Weights:
        """Returns the weights that the model has once, on one rank."""
        width = self.num_layers * self.size
        table = 0 if self.on_host else self.table_elements(tp_size)
        return Elements(table), Elements(width * hidden_size), Elements(self.size)

    def table_elements(self, tp_size: int) -> int:
        """Returns the numbers in the table on one rank."""
        return -(-self.vocab_size // tp_size) * self.num_layers * self.size

    def activation_elements(self, hidden_size: int, ranks: RankLayout) -> int:
        return 3 * self.size + hidden_size
