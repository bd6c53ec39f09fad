"""The interface of short convolution kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sglang.srt.layers.compressed_step import TokenRequests
from sglang.srt.layers.last_rows import KeepLast


class Convolve(Protocol):
    """Signature of `native_convolution.convolve`."""

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
    """The kernels of a short convolution: the convolution, and keeping each request's last rows for the next step."""

    convolve: Convolve
    keep: KeepLast
