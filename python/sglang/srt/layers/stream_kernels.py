"""Interface of the kernels of gated residual streams: what lies between two blocks, beside two products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class PlaceAndNorm(Protocol):
    """`native_streams.place_and_norm` says what the arguments are."""

    def __call__(
        self,
        streams: torch.Tensor,
        out: torch.Tensor | None,
        placement: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
    ) -> torch.Tensor: ...


class Bend(Protocol):
    """`native_streams.bend` says what the arguments are."""

    def __call__(self, products: torch.Tensor, rank: int, streams: int) -> tuple[torch.Tensor, torch.Tensor]: ...


class MixStreams(Protocol):
    """`native_streams.mix_streams` says what the arguments are."""

    def __call__(self, gates: torch.Tensor, normed: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class StreamKernels:
    place_and_norm: PlaceAndNorm
    bend: Bend
    mix: MixStreams
