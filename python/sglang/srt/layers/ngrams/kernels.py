"""Interface of the kernels of n-gram embeddings: the rows of a step's tokens, what goes into the streams, and the state
of each request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sglang.srt.layers.compressed.step import TokenRequests


@dataclass(frozen=True, slots=True)
class NgramHash:
    """The numbers by which n-grams find their rows: multipliers [longest] of token ids, the last token's first; sizes
    and offsets [heads] of the heads' parts of the table, those of this rank; all int64. Head h is of n-grams of
    2 + (first_head + h) // per_ngram tokens. `end_token`: beyond which no n-gram reaches; `fill`: what stands for it
    and for tokens that an n-gram does not reach (None: the end token)."""

    multipliers: torch.Tensor
    sizes: torch.Tensor
    offsets: torch.Tensor
    first_head: int
    per_ngram: int
    end_token: int
    fill: int | None = None

    @property
    def filling(self) -> int:
        return self.end_token if self.fill is None else self.fill


class NgramRows(Protocol):
    """`native.ngram_rows` says what the arguments are."""

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
    """`native.gate_values` says what the arguments are."""

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
    """`native.convolve_values` says what the arguments are."""

    def __call__(
        self,
        values: torch.Tensor,
        normed: torch.Tensor,
        weight: torch.Tensor,
        dilation: int,
        kept: torch.Tensor,
        requests: TokenRequests,
    ) -> None: ...


class KeepLast(Protocol):
    """`native.keep_last` says what the arguments are."""

    def __call__(self, new: torch.Tensor, kept: torch.Tensor, requests: TokenRequests) -> None: ...


@dataclass(frozen=True, slots=True)
class NgramKernels:
    rows: NgramRows
    gate: GateValues
    convolve: ConvolveValues
    keep: KeepLast
