"""Launches of blocks/gated_sum."""

from __future__ import annotations

import torch

from sglang.srt.blocks.gated_sum.kernels.gated_sum import gated_sum

from .inputs import BF16, empty


def launch_gated_sum(hidden: int) -> None:
    """Behind a mixer and behind a feed-forward block, before a norm of a layer, whose weights are stored minus 1, and
    before the last one."""
    gate = empty(hidden, dtype=torch.float32)
    for scale in (None, gate):
        for dtype in (torch.float32, BF16):
            gated_sum(empty(100, hidden), empty(100, hidden), scale, gate, 1e-8, empty(hidden, dtype=dtype), 1e-6)
