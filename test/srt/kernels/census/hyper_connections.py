"""Launches of blocks/hyper_connections."""

from __future__ import annotations

import torch

from sglang.srt.blocks.hyper_connections.kernels import hyper_connection
from sglang.srt.blocks.hyper_connections.spec import HyperConnections

from .inputs import MANY, empty


def launch_hyper_connections(spec: HyperConnections, hidden: int) -> None:
    """Before the first block, between blocks, and behind the last one."""
    streams = spec.streams
    for tokens in (1, 100, 1000, MANY):
        x, columns = empty(tokens, streams, hidden), sum(spec.pieces[1:]) + streams * spec.lagged
        placement = empty(tokens, columns, dtype=torch.float32)
        made, between = (empty(tokens, hidden), placement), (spec.outputs, len(spec.pieces))
        forms = [(*between, (None, None)), (*between, made)]
        for outputs, pieces, before in (*forms, *([] if spec.lagged else [(streams, 1, made)])):
            matrix, base, scale = (
                empty(*shape, dtype=torch.float32) for shape in ((outputs, streams * hidden), (outputs,), (pieces,))
            )
            hyper_connection.hyper_connection(
                x, *before, matrix, base, scale, empty(hidden), 1e-6, 1e-6, 20, spec.lagged
            )
