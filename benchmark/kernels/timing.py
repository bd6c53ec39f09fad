"""Device time of kernels: a CUDA graph of many calls over rotating buffers, so that neither launches nor caches flatter
the numbers. And what this GPU can do at most, measured in the same way.

Needs torch only: peers are timed by it in processes that have no other package of this project.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import torch

COLD_BYTES = 512 << 20
"""Rotating buffers together exceed every cache by far."""
MATMUL_SIZE = 8192

Calls = Sequence[Callable[[], object]]
"""Each uses its own buffers."""


def copies_for(bytes_per_call: int, maximum: int = 64, cold_bytes: int = COLD_BYTES) -> int:
    """How many sets of operands make the caches cold."""
    return max(2, min(maximum, cold_bytes // max(1, bytes_per_call) + 1))


def replays(calls: Calls, minimum: int = 1) -> Iterator[float]:
    """Seconds a call, replay by replay, of one graph of all `calls`, repeated until it has `minimum`. The first replay
    uploads the graph."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    repeats = max(1, minimum // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    while True:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        yield start.elapsed_time(end) * 1e-3 / (repeats * len(calls))


def time_calls(calls: Calls, minimum: int = 24, budget_s: float = 0.1) -> float:
    """Seconds a call: the median of as many replays as take `budget_s`, 5 to 100. Short calls need a graph of at least
    24 for its own start not to count."""
    found = replays(calls, minimum)
    launches = max(len(calls), minimum)
    count = int(budget_s / (list(islice(found, 2))[1] * launches))
    return statistics.median(islice(found, max(5, min(100, count))))


def copy_ceiling() -> float:
    """Bytes a second (read + written) of a large elementwise kernel. A copy is no kernel in a graph, and is slower."""
    x = torch.zeros(1 << 28, dtype=torch.int32, device="cuda")
    y = torch.empty_like(x)
    return 8 * x.numel() / time_calls([lambda: torch.neg(x, out=y)])


def read_ceiling() -> float:
    """Bytes a second of a large reduction, which only reads."""
    x = torch.ones(1 << 29, dtype=torch.float32, device="cuda")
    return 4 * x.numel() / time_calls([lambda: x.sum()])


def matmul_ceiling(dtype: torch.dtype = torch.bfloat16) -> float:
    """FLOPs a second of a large square product of random numbers, in bfloat16 or float8_e4m3fn."""
    a, b = (torch.randn((MATMUL_SIZE, MATMUL_SIZE), device="cuda").to(dtype) for _ in range(2))
    one = torch.ones((), device="cuda")

    def product() -> torch.Tensor:
        if dtype == torch.bfloat16:
            return a @ b.T
        return torch._scaled_mm(a, b.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    return 2 * MATMUL_SIZE**3 / time_calls([product])
