"""Sends prompts at a rate, with a limit of requests in flight."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Sequence

import numpy as np
from tqdm import tqdm

from sglang.bench.backends import Backend, CallOptions, RequestResult, run_request
from sglang.bench.datasets import Prompt
from sglang.bench.http_client import Endpoint


def arrival_times(count: int, request_rate: float, rng: np.random.Generator) -> list[float]:
    """Returns the send times in seconds: Poisson arrivals, all at once for an infinite rate."""
    if request_rate == float("inf"):
        return [0.0] * count
    gaps = rng.exponential(1 / request_rate, count)
    times: list[float] = (np.cumsum(gaps) - gaps[:1]).tolist()
    return times


async def run_load(
    backend: Backend,
    endpoint: Endpoint,
    prompts: Sequence[Prompt],
    options: CallOptions,
    arrivals: Sequence[float],
    max_concurrency: int | None,
    progress: bool,
) -> tuple[list[RequestResult], float]:
    """Returns the results in the order of the prompts, and the duration in seconds."""
    _allow_open_files(len(prompts))
    slots = asyncio.Semaphore(max_concurrency or len(prompts))
    bar = tqdm(total=len(prompts), disable=not progress)
    begin = time.perf_counter()

    async def one(prompt: Prompt, at: float) -> RequestResult:
        await asyncio.sleep(begin + at - time.perf_counter())
        async with slots:
            result = await run_request(backend, endpoint, prompt, options)
        bar.update()
        return result

    results = await asyncio.gather(*(one(p, at) for p, at in zip(prompts, arrivals, strict=True)))
    duration = time.perf_counter() - begin
    bar.close()
    return results, duration


def _allow_open_files(connections: int) -> None:
    """Raises the limit of open files: every request in flight is a socket, and common shells allow 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
