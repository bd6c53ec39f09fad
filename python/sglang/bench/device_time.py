"""Measures the device time of calls: replays a CUDA graph of many calls over rotating buffers, to exclude launch times
and warm caches."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]
MIN_CALLS = 24
"""The least number of calls in a graph, so that its own start does not count."""
BUDGET_S = 0.1


def seconds_a_call(calls: Sequence[Call]) -> float:
    """Returns the median of 5 to 100 replays of one graph of all `calls`, within BUDGET_S. Each call uses its own
    buffers."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    repeats = max(1, MIN_CALLS // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    graph.replay()  # the first one uploads the graph
    first = _replay(graph)
    count = max(5, min(100, int(BUDGET_S / first)))
    return statistics.median(_replay(graph) for _ in range(count)) / (repeats * len(calls))


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return max(1e-9, start.elapsed_time(end) * 1e-3)
