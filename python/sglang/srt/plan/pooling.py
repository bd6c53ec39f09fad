"""What a model that generates no text makes of the hidden states of a text: an embedding, or scores of labels."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.configs.sentence_modules import DenseModule


@dataclass(frozen=True, slots=True)
class Pooling:
    """method: which states are taken (`configs.sentence_modules`); dense: linear layers behind it; num_labels: scores
    that a classifier's head computes of the result; 0: there is no such head. Such a model computes each text whole, in
    one step, and caches nothing."""

    method: str
    dense: tuple[DenseModule, ...] = ()
    num_labels: int = 0

    def width(self, hidden_size: int) -> int:
        """Returns the values that a text gets."""
        return self.num_labels or (self.dense[-1].rows if self.dense else hidden_size)

    def describe(self) -> str:
        """Describes it for people."""
        parts = [self.method, *(f"dense {layer.rows}" for layer in self.dense)]
        parts += [f"{self.num_labels} labels"] if self.num_labels else []
        return ", ".join(parts)
