"""The kernels of a short convolution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

Convolve = TypeVar("Convolve", covariant=True)
Keep = TypeVar("Keep", covariant=True)


@dataclass(frozen=True, slots=True)
class ConvolutionKernels(Generic[Convolve, Keep]):
    """The convolution, and keeping each request's last rows for the next step, with the types of those in
    `reference`."""

    convolve: Convolve
    keep: Keep
