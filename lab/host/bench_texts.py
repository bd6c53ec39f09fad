"""How long a client with a short conversation waits while others send long ones: rendering and tokenizing, no model.

    sglang serve --port 30000 --device cpu &
    python lab/host/bench_texts.py --url http://127.0.0.1:30000

Each long client is an agent: it sends its conversation again and again, with a turn more each time. `--fresh` sends a
new conversation each time instead. Both use `/v1/messages/count_tokens`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time

import httpx

WORDS = ("the", "file", "import", "return", "value", "test", "of", "function", "server", "name", "und", "größer")


def text(num_chars: int, rng: random.Random) -> str:
    words = " ".join(rng.choices(WORDS, k=num_chars // 5))
    return words[:num_chars]


def conversation(num_chars: int, rng: random.Random) -> list[dict[str, str]]:
    """Turns of 8,000 characters."""
    return [{"role": "user", "content": text(8000, rng)} for _ in range(max(1, num_chars // 8000))]


async def count(client: httpx.AsyncClient, messages: list[dict[str, str]]) -> float:
    """Seconds until the answer."""
    body = json.dumps({"model": "x", "max_tokens": 1, "messages": messages}).encode()
    started = time.perf_counter()
    answer = await client.post("/v1/messages/count_tokens", content=body, headers={"content-type": "application/json"})
    answer.raise_for_status()
    return time.perf_counter() - started


async def agent(client: httpx.AsyncClient, args: argparse.Namespace, number: int, times: list[float]) -> None:
    rng = random.Random(number)
    messages = conversation(args.chars, rng)
    while True:
        times.append(await count(client, messages))
        messages = conversation(args.chars, rng) if args.fresh else [*messages, *conversation(1000, rng)]


async def measure(args: argparse.Namespace) -> None:
    rng = random.Random(0)
    short = [{"role": "user", "content": text(5000, rng)}]
    async with httpx.AsyncClient(base_url=args.url, timeout=600, limits=httpx.Limits(max_connections=64)) as client:
        alone = sorted([await count(client, short) for _ in range(50)])
        times: list[float] = []
        agents = [asyncio.ensure_future(agent(client, args, number, times)) for number in range(args.clients)]
        started, beside = time.perf_counter(), []
        while time.perf_counter() - started < args.seconds:
            beside.append(await count(client, short))
            await asyncio.sleep(0.05)
        for each in agents:
            each.cancel()
        await asyncio.gather(*agents, return_exceptions=True)
    beside.sort()
    print(f"short client alone:  median {alone[len(alone) // 2] * 1e3:.1f} ms, longest {alone[-1] * 1e3:.1f} ms")
    print(
        f"beside {args.clients} long ones: median {beside[len(beside) // 2] * 1e3:.1f} ms, "
        f"longest {beside[-1] * 1e3:.1f} ms, of {len(beside)}"
    )
    print(f"long ones: {len(times) / args.seconds:.1f} a second")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--chars", type=int, default=400_000)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--fresh", action="store_true")
    asyncio.run(measure(parser.parse_args()))
