"""The interface of a compressor's kernels: storing a step's entries, and keeping the rows that later entries need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class Compress(Protocol):
    """Signature of `reference.compress`."""

    def __call__(
        self,
        rows: torch.Tensor,
        bias: torch.Tensor | None,
        state: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        firsts: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        cos_sin: torch.Tensor | None,
        cache: torch.Tensor,
        out_cache_loc: torch.Tensor,
        *,
        angles: int = 0,
    ) -> None: ...


class Keep(Protocol):
    """Signature of `reference.keep`."""

    def __call__(
        self,
        rows: torch.Tensor,
        state: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        stops: torch.Tensor,
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class CompressorKernels:
    """The kernels of a compressor."""

    compress: Compress
    keep: Keep
