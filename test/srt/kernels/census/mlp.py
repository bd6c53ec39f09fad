"""Launches of blocks/mlp, and of whatever else has a gated activation."""

from __future__ import annotations

from sglang.srt.configs.activation import Activation
from sglang.srt.layers.triton_ops import activation

from .inputs import empty


def launch_activation(function: Activation, inter: int) -> None:
    for tokens in (1, 100):
        activation.activate(empty(tokens, (1 + function.gated) * inter), function)
