"""A load of requests that share nothing, on servers with and without prefixes in main memory, in turn on one GPU."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from typing import Any

from sessions import new_tokens


async def one(engine: Any, ids: list[int], output: int, limit: asyncio.Semaphore) -> tuple[float, list[float]]:
    """Seconds to the first token, and between the others."""
    sampling = {"temperature": 0.0, "max_new_tokens": output, "ignore_eos": True}
    async with limit:
        start = time.perf_counter()
        times = []
        async for _ in await engine.async_generate(input_ids=ids, sampling_params=sampling, stream=True):
            times.append(time.perf_counter())
    return times[0] - start, [b - a for a, b in itertools.pairwise(times)]


async def run(engine: Any, options: dict[str, Any], seed: int) -> dict[str, float]:
    rng = random.Random(seed)
    prompts = [new_tokens(rng, options["input"]) for _ in range(options["requests"])]
    limit = asyncio.Semaphore(options["concurrency"])
    start = time.perf_counter()
    done = await asyncio.gather(*(one(engine, ids, options["output"], limit) for ids in prompts))
    seconds = time.perf_counter() - start
    gaps = [gap for _, of_one in done for gap in of_one]
    return {
        "tok_s": len(done) * options["output"] / seconds,
        "ttft_ms": 1e3 * statistics.mean(first for first, _ in done),
        "itl_ms": 1e3 * statistics.median(gaps),
        "p99_itl_ms": 1e3 * statistics.quantiles(gaps, n=100, method="inclusive")[98],
    }


def main() -> None:
    options = json.loads(sys.argv[1])
    from sglang import Engine

    engines: dict[str, Any] = {}
    try:
        for name, flags in options["servers"].items():
            engines[name] = Engine(
                model_path=options["model_path"], load_format="dummy", skip_tokenizer_init=True, **flags
            )
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
        for seed in range(options["rounds"] + 1):
            names = list(engines) if seed % 2 else list(engines)[::-1]
            for name in names:
                row = asyncio.run(run(engines[name], options, seed))
                if seed:  # the first one warms up
                    rows[name].append(row)
        found = {
            name: {key: statistics.median(row[key] for row in of_one) for key in of_one[0]}
            for name, of_one in rows.items()
        }
        print("\n" + json.dumps({"rows": rows, "median": found}), flush=True)
    finally:
        for engine in engines.values():
            engine.shutdown()


if __name__ == "__main__":
    main()
