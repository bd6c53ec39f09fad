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


class CallTimer:
    """A CUDA graph of calls, each of which uses its own buffers, to be replayed as often as wanted."""

    def __init__(self, calls: Sequence[Call]) -> None:
        """Runs some of the calls, which compiles them, and captures all."""
        for call in calls[:2]:
            call()
        torch.cuda.synchronize()
        repeats = max(1, MIN_CALLS // len(calls))
        self._num_calls = repeats * len(calls)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for _ in range(repeats):
                for call in calls:
                    call()
        self._graph.replay()  # the first one uploads the graph

    def seconds(self, budget_s: float = BUDGET_S) -> float:
        """Returns the median seconds of a call over 5 to 100 replays, within `budget_s`."""
        first = _replay(self._graph)
        count = max(5, min(100, int(budget_s / first)))
        return statistics.median(_replay(self._graph) for _ in range(count)) / self._num_calls


def seconds_a_call(calls: Sequence[Call]) -> float:
    """Returns the median of 5 to 100 replays of one graph of all `calls`, within BUDGET_S."""
    return CallTimer(calls).seconds()


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return max(1e-9, start.elapsed_time(end) * 1e-3)
