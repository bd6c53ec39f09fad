"""Activations that the preceding norm has already quantized, which saves a launch that would read them again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from sglang.srt.configs.quant_scheme import Scheme
from sglang.srt.kernels.spec import Choice

if TYPE_CHECKING:
    from sglang.srt.hardware.arch import ArchTraits

RowForm = Literal["token", "group128"]
"""e4m3 with one scale per row, or per 128 columns of a row; as `Scheme.activation`."""
MIN_ROWS = 3
"""Fewest rows that are quantized; fewer are multiplied in 16 bits."""


@dataclass(frozen=True, slots=True)
class RowFormat:
    """The format in which a product takes at least `least` rows; fewer it takes in 16 bits."""

    form: RowForm
    least: int = MIN_ROWS


@dataclass(frozen=True, slots=True)
class QuantizedActivations:
    """Activations `values` [T, H] in 16 bits, with their result of `quantize_activation`: `data` [T, H] e4m3 and
    `scale` fp32 [T] or [T, ceil(H / 128)]."""

    values: torch.Tensor
    data: torch.Tensor
    scale: torch.Tensor
    form: RowForm


Activations = torch.Tensor | QuantizedActivations


def values_of(x: Activations) -> torch.Tensor:
    """Returns the activations [T, H] in 16 bits."""
    return x.values if isinstance(x, QuantizedActivations) else x


def row_format(choice: Choice, scheme: Scheme | None, arch: ArchTraits) -> RowFormat | None:
    """Returns the format in which the chosen kernel takes many rows, if a norm can produce it; otherwise None.
    `scheme`: of the weights in memory."""
    if choice.spec.package != "triton" or scheme is None or scheme.element != "e4m3":
        return None
    from sglang.srt.kernels.scaled_product import product_of

    activation = product_of(scheme, arch.features).activation
    return RowFormat(activation) if activation in ("token", "group128") else None  # type: ignore[arg-type]
