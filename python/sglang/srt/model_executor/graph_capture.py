"""How a step becomes a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch


class StaticOutput:
    """Results at a fixed address, one for all graphs of a runner: each would keep its own otherwise, 300 MB for logits
    of 512 rows. Those of another width have another address: of few rows of logits a rank has all columns, of many its
    own."""

    def __init__(self) -> None:
        self._buffers: dict[torch.Size, torch.Tensor] = {}

    def keep(self, result: torch.Tensor) -> torch.Tensor:
        """Where the result [N, ...] will be after each replay, until the next. Called in every step; the first of a
        width has the most rows and is not captured."""
        width = result.shape[1:]
        if width not in self._buffers:
            self._buffers[width] = torch.empty_like(result)
        return self._buffers[width][: len(result)].copy_(result)


def capture(step: Callable[[], object], pool: Any = None) -> torch.cuda.CUDAGraph:
    """The graph of `step`, which runs twice before: kernels are compiled and libraries choose theirs, neither of which
    may happen during a capture. Nor may garbage be collected: it may hold an older graph, whose destruction is not
    permitted then and spoils the capture. `pool`: of the graph whose memory this one may use."""
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool):
            step()
    finally:
        if collecting:
            gc.enable()
    return graph
