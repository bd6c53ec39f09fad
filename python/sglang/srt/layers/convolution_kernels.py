"""Interface of the kernels of short convolutions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sglang.srt.layers.compressed.step import TokenRequests
from sglang.srt.layers.ngrams.kernels import KeepLast


class Convolve(Protocol):
    """`native_convolution.convolve` says what the arguments are."""

    def __call__(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        kept: torch.Tensor,
        requests: TokenRequests,
        out: torch.Tensor,
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class ConvolutionKernels:
    convolve: Convolve
    keep: KeepLast
