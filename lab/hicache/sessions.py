"""Sessions that return after their prefixes were evicted, and what others notice of a load.

The pool holds the longest session and little more: all others together evict each of them. Each has a second turn while
the GPU has it, so that a server which copies at the second hit does; saves are done before anything returns.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from servers import Server, last_meta

TOKEN_LIMIT = 10_000
"""Token ids of prompts lie below."""
UNKNOWN_SAVES_S = 5.0
"""Wait for a server that does not say what main memory has, each time."""


def say(text: str) -> None:
    print(f"# {text}", flush=True)


def new_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, TOKEN_LIMIT) for _ in range(count)]


async def ask(server: Server, ids: Sequence[int], output: int) -> tuple[dict[str, Any], list[int]]:
    """Time to the first token and where the cached tokens came from, and the answer."""
    first, tokens, data = 0.0, list[int](), b""
    async for seconds, data in server.events(ids, output):
        first = first or seconds
        meta, new = last_meta(data)
        # All tokens so far, or those since the last event.
        tokens = list(new) if len(new) >= meta["completion_tokens"] else [*tokens, *new]
    meta, _ = last_meta(data)
    details = meta.get("cached_tokens_details") or {}
    row = {"tokens": len(ids), "ttft_ms": 1e3 * first, "cached": meta.get("cached_tokens", 0), **details}
    return row, tokens


def wait_for_host(server: Server, reached: Callable[[dict[str, Any]], bool], limit: float) -> float:
    """Waits until main memory's state is as wanted; where the server does not say what it is, for some seconds. Returns
    the seconds."""
    start = time.perf_counter()
    while time.perf_counter() - start < limit:
        try:
            host = server.info()["internal_states"][0]["memory_usage"]["host"]
        except (KeyError, TypeError, IndexError):
            time.sleep(UNKNOWN_SAVES_S)
            break
        if reached(host):
            break
        time.sleep(0.1)
    return time.perf_counter() - start


async def sessions(server: Server, options: dict[str, Any]) -> dict[str, Any]:
    """`texts` of the result: the tokens of each session."""
    rng = random.Random(0)
    lengths, more = options["sessions"], options["more"]
    for length in (more * 8, more * 8, more):
        await ask(server, new_tokens(rng, length), 4)
    ready_s = wait_for_host(server, lambda host: host.get("ready", True), 3 * options["save_limit_s"])
    say(f"main memory ready after {ready_s:.1f} s")
    texts: dict[int, list[int]] = {}
    rows: dict[str, Any] = {"computed": [], "on the GPU": [], "loaded": []}
    for length in lengths:
        prompt = new_tokens(rng, length)
        row, answer = await ask(server, prompt, 8)
        say(f"{length:,} tokens computed: {row['ttft_ms']:.0f} ms")
        rows["computed"].append(row)
        texts[length] = prompt + answer
        row, _ = await ask(server, texts[length] + new_tokens(rng, more), 8)
        rows["on the GPU"].append({"session": length, **row})
    rows["saved_s"] = wait_for_host(server, lambda host: host["cached"] >= sum(lengths), options["save_limit_s"])
    say(f"saved after {rows['saved_s']:.1f} s")
    for _ in range(options["rounds"]):
        for length in lengths:
            row, _ = await ask(server, texts[length] + new_tokens(rng, more), 8)
            say(f"{length:,} tokens return: {row['ttft_ms']:.0f} ms, {row.get('host', '?')} of main memory")
            rows["loaded"].append({"session": length, **row})
    rows["texts"] = texts
    return rows


class Streams:
    """Requests that decode together, and the times at which their tokens came."""

    def __init__(self, server: Server, options: dict[str, Any], rng: random.Random) -> None:
        self.server, self.options, self.rng = server, options, rng
        self.times: list[list[float]] = []
        self.loads: list[tuple[float, float]] = []

    async def one(self) -> None:
        times: list[float] = []
        self.times.append(times)
        prompt = new_tokens(self.rng, self.options["stream_prompt"])
        async for _ in self.server.events(prompt, self.options["stream_tokens"]):
            times.append(time.perf_counter())

    async def returns(self, ids: list[int]) -> dict[str, Any]:
        start = time.perf_counter()
        row, _ = await ask(self.server, ids, 1)
        self.loads.append((start, time.perf_counter()))
        return row

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


async def others(server: Server, options: dict[str, Any], texts: dict[int, list[int]]) -> dict[str, Any]:
    """The gaps between the tokens of others: alone, while prompts come that have a prefix on the GPU, and while such a
    prefix is loaded."""
    rng = random.Random(1)
    one, other = (texts[length][: options["prefix"]] for length in options["sessions"][:-3:-1])
    suffix = options["more"]
    rows: dict[str, Any] = {}

    async def run(name: str, prompts: list[list[int]]) -> None:
        rows[name] = await Streams(server, options, rng).run(prompts)
        say(f"others, {name}: p99 {rows[name]['all'].get('p99_ms', 0.0):.2f} ms")

    await run("alone", [])
    await ask(server, one + new_tokens(rng, suffix), 1)
    await run("on the GPU", [one + new_tokens(rng, suffix) for _ in range(options["returns"])])
    turns = [other if i % 2 == 0 else one for i in range(options["returns"])]
    await run("loaded", [text + new_tokens(rng, suffix) for text in turns])
    return rows
