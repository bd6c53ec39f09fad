"""Parts of attention that some models have and others do not: small values of which `mixers` are made."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.plan.layer_spec import Elements, Matrix, Weights


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
