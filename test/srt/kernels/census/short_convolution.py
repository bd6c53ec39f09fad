"""Launches of blocks/short_convolution."""

from __future__ import annotations

import torch

from sglang.srt.blocks.short_convolution.kernels import short_convolution
from sglang.srt.blocks.short_convolution.spec import ShortConvolution
from sglang.srt.layers.compressed_step import TokenRequests
from sglang.srt.layers.triton_ops import keep_last

from .inputs import REQUESTS, empty


def launch_short_convolution(spec: ShortConvolution) -> None:
    launch_convolution(spec.taps, empty(100, spec.channels))


def launch_convolution(taps: int, out: torch.Tensor) -> None:
    """Short convolutions of out's sizes, of one token and of all, whose rows may lie apart."""
    width = out.shape[1]
    kept, weight = empty(REQUESTS, taps - 1, width), empty(width, taps)
    for tokens in (1, len(out)):
        at = empty(tokens, dtype=torch.int64)
        requests, rows = TokenRequests(at, at, at, at), empty(tokens, width)
        short_convolution.convolve(rows, weight, kept, requests, out[:tokens])
        keep_last.keep_last(rows, kept, requests)
