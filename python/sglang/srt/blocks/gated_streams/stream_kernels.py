"""The kernels of gated residual streams, which run between two blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

PlaceAndNorm = TypeVar("PlaceAndNorm", covariant=True)
Bend = TypeVar("Bend", covariant=True)
Mix = TypeVar("Mix", covariant=True)


@dataclass(frozen=True, slots=True)
class StreamKernels(Generic[PlaceAndNorm, Bend, Mix]):
    """The three kernels, with the types of those in `reference`."""

    place_and_norm: PlaceAndNorm
    bend: Bend
    mix: Mix
