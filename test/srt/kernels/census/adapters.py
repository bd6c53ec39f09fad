"""Launches of LoRA adapters."""

from __future__ import annotations

import itertools

import torch

from sglang.ledger.launch_form import named
from sglang.srt.layers.native_adapters import AdapterWeights
from sglang.srt.layers.triton_ops import adapters

from .inputs import empty

SLOTS = 8


def launch_adapters() -> None:
    """For every room of a rank, steps of few and many tokens, one module and several, and layers of a few rows."""
    for room, tokens, rows in itertools.product((16, 32, 64, 128), (1, 100), (6144, 24)):
        parts = 1 if rows == 24 else 3
        weights = AdapterWeights(
            empty(SLOTS, parts, room, 4096),
            empty(SLOTS, rows, room),
            empty(SLOTS, dtype=torch.int32),
            empty(rows, dtype=torch.int32),
        )
        with named("add_adapters", "all"):
            adapters.add_adapters(empty(tokens, 4096), empty(tokens, rows), empty(tokens, dtype=torch.int32), weights)
