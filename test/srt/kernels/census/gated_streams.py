"""Launches of blocks/gated_streams."""

from __future__ import annotations

import torch

from sglang.srt.blocks.gated_streams.kernels import gated_streams
from sglang.srt.layers.triton_ops import norm

from .inputs import empty


def launch_gated_streams(streams: int, rank: int, hidden: int) -> None:
    """Before the first block, between blocks, and behind the last one."""
    for tokens in (1, 100):
        x, weight = empty(tokens, streams, hidden), empty(streams, hidden, dtype=torch.float32)
        for placed in (None, empty(tokens, streams, dtype=torch.float32)):
            out = None if placed is None else empty(tokens, hidden)
            gated_streams.place_and_norm(x, out, placed, weight, 1e-6)
        for width in (rank + streams, rank):
            gated_streams.bend(empty(tokens, width), rank, streams)
        gated_streams.mix_streams(empty(tokens, streams * hidden), x)
        norm.rmsnorm(empty(tokens, streams * hidden), empty(streams * hidden, dtype=torch.float32), 1e-6)  # of a draft
