"""Device time of small kernels: a CUDA graph of many calls over rotating buffers, so that neither launches nor caches
flatter the numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

COLD_BYTES = 512 << 20
"""Rotating buffers together exceed every cache by far."""


def copies_for(bytes_per_call: int, most: int = 64) -> int:
    """How many sets of operands make the caches cold."""
    return max(2, min(most, COLD_BYTES // max(1, bytes_per_call) + 1))


def time_calls(calls: Sequence[Callable[[], object]], replays: int = 5) -> float:
    """Seconds a call: best replay of one graph of all `calls`, each of which uses its own buffers."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    repeats = max(1, 24 // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    graph.replay()
    best = float("inf")
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) * 1e-3 / (repeats * len(calls)))
    return best


def copy_ceiling() -> float:
    """Bytes a second (read + written) of a large device copy."""
    x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.numel() / time_calls([lambda: y.copy_(x)])


def read_ceiling() -> float:
    """Bytes a second of a large reduction, which only reads."""
    x = torch.ones(1 << 29, dtype=torch.float32, device="cuda")
    return 4 * x.numel() / time_calls([lambda: x.sum()])
