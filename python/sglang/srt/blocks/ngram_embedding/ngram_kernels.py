"""The interface of the kernels of n-gram embeddings: table lookup, gating, convolution, and the requests' state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sglang.srt.layers.compressed_step import TokenRequests
from sglang.srt.layers.last_rows import KeepLast


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


class NgramRows(Protocol):
    """Signature of `reference.ngram_rows`."""

    def __call__(
        self,
        ids: torch.Tensor,
        kept: torch.Tensor,
        requests: TokenRequests,
        hashed: NgramHash,
        table: torch.Tensor,
        scale: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None: ...


class GateValues(Protocol):
    """Signature of `reference.gate_values`."""

    def __call__(
        self,
        products: torch.Tensor,
        streams: torch.Tensor,
        key_weight: torch.Tensor,
        query_weight: torch.Tensor,
        conv_weight: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class ConvolveValues(Protocol):
    """Signature of `reference.convolve_values`."""

    def __call__(
        self,
        values: torch.Tensor,
        normed: torch.Tensor,
        weight: torch.Tensor,
        dilation: int,
        kept: torch.Tensor,
        requests: TokenRequests,
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class NgramKernels:
    """The kernels of n-gram embeddings."""

    rows: NgramRows
    gate: GateValues
    convolve: ConvolveValues
    keep: KeepLast
