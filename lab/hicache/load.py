"""A load of requests that share nothing, on servers with and without prefixes in main memory, in turn on one GPU."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from typing import Any

from servers import Server
from sessions import new_tokens, say


async def one(server: Server, ids: list[int], output: int, limit: asyncio.Semaphore) -> tuple[float, list[float]]:
    """Seconds to the first token, and between the others."""
    async with limit:
        times = [seconds async for seconds, _ in server.events(ids, output)]
    return times[0], [b - a for a, b in itertools.pairwise(times)]


async def run(server: Server, options: dict[str, Any], seed: int) -> dict[str, float]:
    rng = random.Random(seed)
    prompts = [new_tokens(rng, options["input"]) for _ in range(options["requests"])]
    # Answers of several lengths: were they equal, all would end in one step, and the few steps that compute the next
    # prompts would be 1% of the gaps, so that their 99th percentile were a decode step's or a prompt's by chance.
    outputs = [rng.randint(options["output"] // 2, options["output"] * 3 // 2) for _ in prompts]
    limit = asyncio.Semaphore(options["concurrency"])
    start = time.perf_counter()
    sent = zip(prompts, outputs, strict=True)
    done = await asyncio.gather(*(one(server, ids, output, limit) for ids, output in sent))
    seconds = time.perf_counter() - start
    gaps = [gap for _, of_one in done for gap in of_one]
    return {
        "tok_s": sum(outputs) / seconds,
        "ttft_ms": 1e3 * statistics.mean(first for first, _ in done),
        "itl_ms": 1e3 * statistics.median(gaps),
        "p99_itl_ms": 1e3 * statistics.quantiles(gaps, n=100, method="inclusive")[98],
    }


async def load(servers: dict[str, Server], options: dict[str, Any]) -> dict[str, Any]:
    """Medians over rounds in which the servers take turns, and who begins changes; the first round warms up. Ratios are
    of the same round, to the first server."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
    for seed in range(options["rounds"] + 1):
        names = list(servers) if seed % 2 else list(servers)[::-1]
        for name in names:
            row = await run(servers[name], options, seed)
            say(f"load, {name}: {row['tok_s']:.0f} tokens/s")
            if seed:
                rows[name].append(row)
    medians = {
        name: {key: statistics.median(row[key] for row in of_one) for key in of_one[0]} for name, of_one in rows.items()
    }
    base = rows[next(iter(servers))]
    ratios = {
        name: {key: [row[key] / of_base[key] for row, of_base in zip(of_one, base, strict=True)] for key in of_one[0]}
        for name, of_one in rows.items()
    }
    return {"rows": rows, "median": medians, "ratios": ratios}
