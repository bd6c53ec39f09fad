"""Activations that come quantized from the norm before a product: the norm has the row at hand, and the product saves a
launch that would read it again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from sglang.srt.configs.quant_scheme import Scheme
from sglang.srt.kernels.spec import Choice

if TYPE_CHECKING:
    from sglang.srt.hardware.arch import ArchTraits

RowForm = Literal["token", "group128"]
"""e4m3 with one scale a row, or one for 128 columns of a row; as `Scheme.activation`."""
LEAST_ROWS = 3
"""Fewer are multiplied in 16 bits."""


@dataclass(frozen=True, slots=True)
class RowFormat:
    """The format in which products take x, from `least` rows on; fewer they take in 16 bits."""

    form: RowForm
    least: int = LEAST_ROWS


@dataclass(frozen=True, slots=True)
class QuantizedActivations:
    """`values` [T, H] in 16 bits; `data` [T, H] e4m3 and `scale` fp32 [T] or [T, ceil(H / 128)], which are what
    `quantize_activation` makes of `values`."""

    values: torch.Tensor
    data: torch.Tensor
    scale: torch.Tensor
    form: RowForm


Activations = torch.Tensor | QuantizedActivations


def values_of(x: Activations) -> torch.Tensor:
    """[T, H] in 16 bits."""
    return x.values if isinstance(x, QuantizedActivations) else x


def row_format(choice: Choice, scheme: Scheme | None, arch: ArchTraits) -> RowFormat | None:
    """The format in which the chosen kernel takes many rows, if a norm can make it. `scheme`: of its weights in
    memory."""
    if choice.spec.package != "triton" or scheme is None or scheme.element != "e4m3":
        return None
    from sglang.srt.kernels.scaled_product import product_of

    activation = product_of(scheme, arch.features).activation
    return RowFormat(activation) if activation in ("token", "group128") else None  # type: ignore[arg-type]
