"""What the scheduler's host-side steps cost, beside the step that hides them.

    python benchmark/host/bench_host.py

Prints the best of many runs in microseconds, and its share of a decode step of --step-ms, which overlaps it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from sglang.srt.mem_cache.allocator import TokenAllocator
from sglang.srt.mem_cache.radix_cache import RadixCache


def best_of(step: Callable[[], object], repeats: int = 200) -> float:
    """Seconds."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        best = min(best, time.perf_counter() - start)
    return best


def decode_allocation(page_size: int) -> float:
    """One more token for each of 512 requests."""
    allocator = TokenAllocator(1 << 20, page_size)
    lens = np.full(512, 1000, np.int64)
    slots = allocator.alloc(np.zeros(512, np.int64), lens, np.full(512, -1))
    assert slots is not None
    last = slots.reshape(512, 1000)[:, -1]

    def step() -> None:
        nonlocal lens, last
        new = allocator.alloc(lens, lens + 1, last)
        assert new is not None
        lens, last = lens + 1, new

    return best_of(step)


def prefix_match() -> float:
    """A cached prompt of 8192 tokens."""
    allocator = TokenAllocator(1 << 16, 1)
    cache = RadixCache(allocator, 1)
    tokens = np.random.default_rng(0).integers(0, 150_000, 8192, dtype=np.int32)
    slots = allocator.alloc([0], [8192], None)
    assert slots is not None
    cache.commit(tokens, slots, cache.root, 0)
    return best_of(lambda: cache.match_prefix(tokens))


def import_seconds() -> float:
    """Of `import sglang` in a fresh interpreter."""
    program = "import time; start = time.perf_counter(); import sglang; print(time.perf_counter() - start)"
    return min(float(subprocess.check_output([sys.executable, "-c", program])) for _ in range(3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=5.0, help="a decode step to compare with")
    step = parser.parse_args().step_ms * 1e-3
    for name, seconds in {
        "allocate 512 tokens, page size 1": decode_allocation(1),
        "allocate 512 tokens, page size 16": decode_allocation(16),
        "match a cached prompt of 8192": prefix_match(),
    }.items():
        print(f"{name:<40} {seconds * 1e6:>10.1f} us {seconds / step:>8.2%} of a step")
    print(f"{'import sglang':<40} {import_seconds() * 1e6:>10.1f} us")


if __name__ == "__main__":
    main()
