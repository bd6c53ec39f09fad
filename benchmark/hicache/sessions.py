"""Sessions that return after their prefixes were evicted, and what others notice of a load.

Runs with whichever `sglang` is on PYTHONPATH, upstream's too, or with a server that a command starts (`command`). The
pool holds the longest session and little more: all others together evict each of them. Saves are done before anything
returns. Prints lines of progress that begin with `# `, and one JSON object in the end.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

TOKEN_LIMIT = 10_000
"""Token ids of prompts lie below."""


def say(text: str) -> None:
    print(f"# {text}", flush=True)


def new_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, TOKEN_LIMIT) for _ in range(count)]


def ask(engine: Any, ids: Sequence[int], output: int) -> tuple[dict[str, Any], list[int]]:
    """Time to the first token and where the cached tokens came from, and the answer."""
    sampling = {"temperature": 0.0, "max_new_tokens": output, "ignore_eos": True}
    start, first, meta, tokens = time.perf_counter(), 0.0, {}, []
    for result in engine.generate(input_ids=list(ids), sampling_params=sampling, stream=True):
        first = first or time.perf_counter() - start
        meta, new = result["meta_info"], result["output_ids"]
        # All tokens so far, or those since the last result.
        tokens = list(new) if len(new) >= meta["completion_tokens"] else [*tokens, *new]
    details = meta.get("cached_tokens_details") or {}
    row = {"tokens": len(ids), "ttft_ms": 1e3 * first, "cached": meta.get("cached_tokens", 0), **details}
    return row, tokens


def wait_for_host(engine: Any, reached: Callable[[dict[str, Any]], bool], limit: float) -> float:
    """Waits until main memory's state is as wanted; where the server does not say what it is, for ten seconds. Returns
    the seconds."""
    start = time.perf_counter()
    while time.perf_counter() - start < limit:
        try:
            host = engine.get_server_info()["internal_states"][0]["memory_usage"]["host"]
        except (KeyError, TypeError, IndexError):
            time.sleep(10)
            break
        if reached(host):
            break
        time.sleep(0.1)
    return time.perf_counter() - start


def sessions(engine: Any, options: dict[str, Any]) -> dict[str, Any]:
    rng = random.Random(0)
    lengths, more = options["sessions"], options["more"]
    ask(engine, new_tokens(rng, more * 8), 4)
    ask(engine, new_tokens(rng, more * 8), 4)
    ready_s = wait_for_host(engine, lambda host: host["ready"], options["save_limit_s"])
    say(f"main memory ready after {ready_s:.1f} s")
    texts: dict[int, list[int]] = {}
    found: dict[str, Any] = {"computed": [], "loaded": []}
    for length in lengths:
        prompt = new_tokens(rng, length)
        row, answer = ask(engine, prompt, 8)
        say(f"{length:,} tokens computed: {row['ttft_ms']:.0f} ms")
        found["computed"].append(row)
        texts[length] = prompt + answer
    found["saved_s"] = wait_for_host(engine, lambda host: host["cached"] >= sum(lengths), options["save_limit_s"])
    say(f"saved after {found['saved_s']:.1f} s")
    for _ in range(options["rounds"]):
        for length in lengths:
            row, _ = ask(engine, texts[length] + new_tokens(rng, more), 8)
            say(f"{length:,} tokens return: {row['ttft_ms']:.0f} ms, {row.get('host', '?')} of main memory")
            found["loaded"].append({"session": length, **row})
    found["texts"] = texts
    return found


class Streams:
    """Requests that decode together, and the times at which their tokens came."""

    def __init__(self, engine: Any, options: dict[str, Any], rng: random.Random) -> None:
        self.engine, self.options, self.rng = engine, options, rng
        self.times: list[list[float]] = []
        self.loads: list[tuple[float, float]] = []

    async def one(self) -> None:
        sampling = {"temperature": 0.0, "max_new_tokens": self.options["stream_tokens"], "ignore_eos": True}
        prompt = new_tokens(self.rng, self.options["stream_prompt"])
        times: list[float] = []
        self.times.append(times)
        async for _ in await self.engine.async_generate(input_ids=prompt, sampling_params=sampling, stream=True):
            times.append(time.perf_counter())

    async def returns(self, ids: list[int]) -> dict[str, Any]:
        sampling = {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True}
        start, meta = time.perf_counter(), {}
        async for result in await self.engine.async_generate(input_ids=ids, sampling_params=sampling, stream=True):
            meta = result["meta_info"]
        end = time.perf_counter()
        self.loads.append((start, end))
        details = meta.get("cached_tokens_details") or {}
        return {"ttft_ms": 1e3 * (end - start), "cached": meta["cached_tokens"], **details}

    async def run(self, prompts: Sequence[list[int]]) -> dict[str, Any]:
        tasks = [asyncio.create_task(self.one()) for _ in range(self.options["streams"])]
        while not all(self.times) or len(self.times) < len(tasks):
            await asyncio.sleep(0.01)
        begun = time.perf_counter()
        returned = []
        for prompt in prompts:
            await asyncio.sleep(self.options["pause_s"])
            returned.append(await self.returns(prompt))
        await asyncio.gather(*tasks)
        gaps = [(a, b) for times in self.times for a, b in itertools.pairwise(times) if a >= begun]
        during = [b - a for a, b in gaps if any(start <= a and b <= end for start, end in self.loads)]
        return {"all": quantiles([b - a for a, b in gaps]), "during": quantiles(during), "returned": returned}


def quantiles(gaps: list[float]) -> dict[str, float]:
    if len(gaps) < 2:
        return {"count": len(gaps)}
    cuts = statistics.quantiles(gaps, n=100, method="inclusive")
    return {"count": len(gaps), "median_ms": 1e3 * cuts[49], "p99_ms": 1e3 * cuts[98], "most_ms": 1e3 * max(gaps)}


def others(engine: Any, options: dict[str, Any], texts: dict[int, list[int]]) -> dict[str, Any]:
    """The gaps between the tokens of others: alone, while prompts come that have a prefix on the GPU, and while such a
    prefix is loaded."""
    rng = random.Random(1)
    one, other = (texts[length][: options["prefix"]] for length in options["sessions"][:-3:-1])
    suffix = options["more"]
    found: dict[str, Any] = {}

    def run(name: str, prompts: list[list[int]]) -> None:
        found[name] = asyncio.run(Streams(engine, options, rng).run(prompts))
        say(f"others, {name}: p99 {found[name]['all'].get('p99_ms', 0.0):.2f} ms")

    run("alone", [])
    ask(engine, one + new_tokens(rng, suffix), 1)
    run("on the GPU", [one + new_tokens(rng, suffix) for _ in range(options["returns"])])
    turns = [other if i % 2 == 0 else one for i in range(options["returns"])]
    run("loaded", [text + new_tokens(rng, suffix) for text in turns])
    return found


def main() -> None:
    options = json.loads(sys.argv[1])
    arguments = {"model_path": options["model_path"], "load_format": "dummy", "skip_tokenizer_init": True}
    arguments |= options["engine"]
    started = time.perf_counter()
    engine: Any
    if options.get("command"):
        from http_engine import HttpEngine

        engine = HttpEngine(options["command"], arguments)
    else:
        from sglang import Engine

        engine = Engine(**arguments)
    found: dict[str, Any] = {"start_s": time.perf_counter() - started}
    say(f"started after {found['start_s']:.0f} s")
    try:
        found |= sessions(engine, options)
        texts = found.pop("texts")
        if options["streams"]:
            found["others"] = others(engine, options, texts)
        print("\n" + json.dumps(found), flush=True)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
