"""The interface of the kernels of gated residual streams, which run between two blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class PlaceAndNorm(Protocol):
    """Signature of `gated_streams.reference.place_and_norm`."""

    def __call__(
        self,
        streams: torch.Tensor,
        out: torch.Tensor | None,
        placement: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
    ) -> torch.Tensor: ...


class Bend(Protocol):
    """Signature of `gated_streams.reference.bend`."""

    def __call__(self, products: torch.Tensor, rank: int, streams: int) -> tuple[torch.Tensor, torch.Tensor]: ...


class MixStreams(Protocol):
    """Signature of `gated_streams.reference.mix_streams`."""

    def __call__(self, gates: torch.Tensor, normed: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class StreamKernels:
    """The kernels of gated residual streams."""

    place_and_norm: PlaceAndNorm
    bend: Bend
    mix: MixStreams
