"""The kernels of a compressor: storing a step's entries, and keeping the rows that later entries need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

Compress = TypeVar("Compress", covariant=True)
Keep = TypeVar("Keep", covariant=True)


@dataclass(frozen=True, slots=True)
class CompressorKernels(Generic[Compress, Keep]):
    """The two kernels, with the types of those in `reference`."""

    compress: Compress
    keep: Keep
