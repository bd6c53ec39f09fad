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
from types import SimpleNamespace

import numpy as np
import torch

from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.wire.io_struct import TokenizedGenerateReq
from sglang.srt.mem_cache.allocator import TokenAllocator
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.model_executor.media_features import MediaFeatures
from sglang.srt.model_executor.step import StepInput, StepResult
from sglang.srt.plan.decode_interval import NEVER
from sglang.srt.plan.media import MediaDescription
from sglang.srt.plan.pool_sizes import PoolSizes
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.towers.qwen3_vl.spec import Qwen3VLTower


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


class NoModel:
    """A model runner whose requests never end, at no cost."""

    tokens_per_step = 1
    lookahead_slots = next_tokens_read = 0
    launches = None

    def __init__(self, num_reqs: int, media: MediaFeatures | None = None) -> None:
        self.media = media
        self.plan = SimpleNamespace(
            pool_sizes=PoolSizes(1 << 20, 1, num_reqs, 4096), page_size=1, context_len=4096, caches_prefixes=True,
            host_cache=None, chunked_prefill_size=-1, max_prefill_tokens=1 << 20, decode_interval=NEVER,
            model=SimpleNamespace(vocab_size=1 << 17),
        )  # fmt: skip
        self.sampling_table = SimpleNamespace(set=lambda *row: None, clear=lambda slot: None)

    def begin(self, slot: int, tokens: object, position_delta: int) -> None:
        pass

    def decodes_in_graph(self, num_reqs: int) -> bool:
        return False

    def forward(self, step: StepInput) -> int:
        return len(step.sampled_slots)

    def sample(self, forward: int, vocab_mask: None) -> StepResult:
        return StepResult(torch.ones(forward, 1, dtype=torch.int64), None)


def scheduler_step(num_reqs: int, stream: bool, media: MediaFeatures | None = None) -> float:
    """Choosing, launching and reading back one decode step, without the model and the device. media: of a model that
    sees, which reads text alone here."""
    args = ServerArgs.from_kwargs(model_path="none")
    scheduler = Scheduler(args, NoModel(num_reqs, media), StopChecker(None))  # type: ignore[arg-type]
    params = SamplingParams(max_new_tokens=4000, ignore_eos=True)
    for i in range(num_reqs):
        msg = TokenizedGenerateReq(rid=str(i), input_ids=[i + 1] * 20, sampling_params=params, stream=stream)
        scheduler.add(msg, i, frozenset())
    for _ in range(3):
        scheduler.step()

    def step() -> None:
        scheduler.step()
        scheduler.outbox.clear()

    return best_of(step, 1000)


def features() -> MediaFeatures:
    """What a server of a model that sees has beside the others."""
    tower = Qwen3VLTower(
        hidden_size=64, intermediate_size=64, num_layers=1, num_heads=1, patch_shape=(3, 2, 16, 16), merge=2,
        out_size=64, side=8,
    )  # fmt: skip
    description = MediaDescription(image_token=1, video_token=2, sections=True, tower=tower)
    return MediaFeatures(description, 64, torch.float32, 1 << 20, "cpu", None)


def with_and_without_tower(num_reqs: int, rounds: int = 12) -> tuple[float, float]:
    """A step of requests of text, of a model that only reads and of one that sees, in turns: the best of each."""
    of_text, of_seeing = zip(
        *((scheduler_step(num_reqs, True), scheduler_step(num_reqs, True, features())) for _ in range(rounds)),
        strict=True,
    )
    return min(of_text), min(of_seeing)


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
        "scheduler, 1 request": scheduler_step(1, True),
        "scheduler, 256 requests": scheduler_step(256, False),
        "scheduler, 256 requests that stream": scheduler_step(256, True),
    }.items():
        print(f"{name:<40} {seconds * 1e6:>10.1f} us {seconds / step:>8.2%} of a step")
    for count in (1, 256):
        text, seeing = with_and_without_tower(count)
        name = f"scheduler, {count} requests, and with a tower"
        print(f"{name:<40} {text * 1e6:>10.1f} us {seeing * 1e6:>10.1f} us {seeing / text - 1:>+8.2%}")
    print(f"{'import sglang':<40} {import_seconds() * 1e6:>10.1f} us")


if __name__ == "__main__":
    main()
