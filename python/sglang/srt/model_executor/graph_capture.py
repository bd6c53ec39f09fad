"""How a step becomes a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch


class StaticOutput:
    """A result at a fixed address, one for all graphs of a runner: each would keep its own otherwise, 300 MB for logits
    of 512 rows. Valid until the next replay."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def keep(self, result: torch.Tensor) -> None:
        """Called in every step; the first one has the largest result [N, W] and is not captured."""
        if self._buffer is None:
            self._buffer = torch.empty_like(result)
        self._buffer[: len(result)].copy_(result)

    def rows(self, count: int) -> torch.Tensor:
        """[count, W], the first rows of the last result."""
        assert self._buffer is not None
        return self._buffer[:count]


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
