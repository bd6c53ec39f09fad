"""The quantized weight of a linear layer, as products read it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Protocol

import torch

from sglang.srt.configs.quant_rules import ModuleQuant
from sglang.srt.configs.quant_scheme import Scheme
from sglang.srt.layers.quantization.activations import Activations
from sglang.srt.layers.quantization.reference import Quantized, dequantize, expand_scale


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """The weight [N, K], one module's or several stacked by rows.

    `data` [N, K], or uint8 [N, K / 2] with even columns in the low bits; `scale` as `scheme.scale_shape(N, K)` (e8m0 as
    uint8, int4's in 16 bits); `row_factor` [N] fp32: NVFP4's global factor of the row's matrix; `input_scale` [parts]
    fp32, all equal once loaded: the static scale of activations, or NVFP4's global factor for them. `shift`, of the
    scale's shape in the model's dtype: 8 minus the zero points of int4 groups.
    """

    data: torch.Tensor
    scheme: Scheme
    scale: torch.Tensor
    row_factor: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None
    shift: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Returns (N, K)."""
        rows, cols = self.data.shape
        return rows, cols * (8 // self.scheme.bits)

    def dequantized(self) -> torch.Tensor:
        """Returns the weight [N, K] in fp32, exact."""
        values = dequantize(Quantized(self.data, self.scale), self.scheme)
        if self.shift is not None:
            values += expand_scale(self.shift.float() * self.scale.float(), self.scheme, *self.shape)
        return values if self.row_factor is None else values * self.row_factor[:, None]


class StoredWeight(Protocol):
    """A weight [N, K] in a form of checkpoints."""

    def dequantized(self) -> torch.Tensor:
        """Returns the weight [N, K] in fp32."""


class QuantizedProduct(Protocol):
    """Multiplies x [..., K] with a quantized weight, plus bias [N]; returns [..., N] in x's dtype or `out_dtype`."""

    def __call__(
        self, x: Activations, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor: ...


def held_scheme(quant: ModuleQuant) -> Scheme:
    """Returns the scheme of a linear weight in memory. A scale per matrix is repeated for every row, so that modules
    with different scales can be stacked without requantizing. Without a static activation scale each token gets its
    own, because with one for all tokens they would influence each other's results."""
    scheme = quant.format
    if scheme.group != (0, 0):
        return scheme
    activation = scheme.activation and ("tensor" if quant.static_input else "token")
    return dataclasses.replace(scheme, group=(1, 0), activation=activation)
