"""How a step becomes a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch


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
