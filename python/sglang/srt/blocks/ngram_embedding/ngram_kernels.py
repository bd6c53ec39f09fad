"""The kernels of n-gram embeddings: table lookup, gating, convolution, and the requests' state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

Lookup = TypeVar("Lookup", covariant=True)
Gate = TypeVar("Gate", covariant=True)
Convolve = TypeVar("Convolve", covariant=True)
Keep = TypeVar("Keep", covariant=True)


@dataclass(frozen=True, slots=True)
class NgramHash:
    """Parameters of the n-gram hash: multipliers [longest] of token ids, the last token's first; sizes and offsets
    [heads] of this rank's heads in the table; all int64. Head h hashes n-grams of 2 + (first_head + h) // per_ngram
    tokens. N-grams do not extend beyond an `end_token`; `fill` replaces it and the tokens that an n-gram does not reach
    (None: the end token)."""

    multipliers: torch.Tensor
    sizes: torch.Tensor
    offsets: torch.Tensor
    first_head: int
    per_ngram: int
    end_token: int
    fill: int | None = None

    @property
    def filling(self) -> int:
        """Returns the id that replaces end tokens and unreachable tokens."""
        return self.end_token if self.fill is None else self.fill


@dataclass(frozen=True, slots=True)
class NgramKernels(Generic[Lookup, Gate, Convolve, Keep]):
    """The four kernels, with the types of those in `reference`."""

    rows: Lookup
    gate: Gate
    convolve: Convolve
    keep: Keep
