"""What grammars cost: throughput with one in every request, and the pauses of plain requests beside hostile ones.

    python lab/grammar/bench_grammar.py [--concurrency 32] [--rounds 5] [--model-path DIR] [server flags]

Every request generates the same number of tokens. Runs with a grammar and runs without take turns; a share is the
median over the rounds of what a run with one reaches of the plain runs before and after it, and so is what it takes of
their processor time, which on a GPU is the host's part and depends less on what else the machine does. Pauses are the
times between two pieces of a stream of plain requests, alone and while grammars are sent that take long to compile or
to follow.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from typing import Any, NamedTuple

import psutil

import sglang
from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.server_args import ServerArgs

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "number": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
    },
    "required": ["name", "number", "tags"],
}
RECORDS = {"type": "array", "items": RECORD, "minItems": 100}
AFTER_THOUGHTS = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>"},
            {"type": "json_schema", "json_schema": RECORDS},
        ],
    },
}
KINDS: dict[str, dict[str, Any]] = {
    "json schema": {"json_schema": json.dumps(RECORDS)},
    "regex": {"regex": "([a-z]+[ ,.])+THE END"},
    "thoughts, json": {"structural_tag": json.dumps(AFTER_THOUGHTS)},
}
"""None ends within a run: a request that ends early would leave the others more of the machine."""

NUM_STREAMS = 8
SLOW_TO_FOLLOW = 'root ::= root root | "a" | "b"'


def slow_to_compile(number: int) -> str:
    """Another one each time, as verdicts are remembered."""
    return "(a|b)*c?" * 6_000 + "x" * number


class Run(NamedTuple):
    tokens_per_s: float
    processor_s: float
    """Of all processes of the engine."""


def processor_seconds() -> float:
    this = psutil.Process()
    times = [process.cpu_times() for process in (this, *this.children(recursive=True))]
    return sum(time.user + time.system for time in times)


def run(engine: sglang.Engine, params: dict[str, Any], concurrency: int, num_tokens: int) -> Run:
    prompts = [f"Write down record number {i} of the list:" for i in range(concurrency)]
    sampling = {"temperature": 0.8, "max_new_tokens": num_tokens, "ignore_eos": True, **params}
    start, computed = time.perf_counter(), processor_seconds()
    results = engine.generate(prompts, [{**sampling, "sampling_seed": i} for i in range(concurrency)])
    seconds, computed = time.perf_counter() - start, processor_seconds() - computed
    counts = {result["meta_info"]["completion_tokens"] for result in results}
    assert counts == {num_tokens}, f"requests ended early, after {sorted(counts)} tokens"
    return Run(concurrency * num_tokens / seconds, computed)


async def pauses(engine: sglang.Engine, num_tokens: int) -> list[float]:
    """Seconds between the pieces of plain streams."""
    gaps: list[float] = []

    async def follow(number: int) -> None:
        params = {"temperature": 0.8, "max_new_tokens": num_tokens, "ignore_eos": True, "sampling_seed": number}
        last = None
        async for _ in await engine.async_generate(f"A long story, number {number}:", params, stream=True):
            now = time.perf_counter()
            if last is not None:
                gaps.append(now - last)
            last = now

    await asyncio.gather(*map(follow, range(NUM_STREAMS)))
    return gaps


async def hostile(engine: sglang.Engine, numbers: itertools.count[int]) -> None:
    """Until it is cancelled: one grammar that compiles long and one that is ambiguous, always on the way."""

    async def send(grammar: str) -> None:
        while True:
            number = next(numbers)
            source = slow_to_compile(number) if grammar == "regex" else f"{SLOW_TO_FOLLOW} # {number}"
            params = {"max_new_tokens": 400, grammar: source}
            try:
                await engine.async_generate("Go on:", params)
            except ValueError:  # refused, or ended: what is expected of it
                pass

    await asyncio.gather(send("regex"), send("ebnf"))


async def pauses_beside_hostile(engine: sglang.Engine, num_tokens: int, numbers: itertools.count[int]) -> list[float]:
    task = asyncio.create_task(hostile(engine, numbers))
    try:
        return await pauses(engine, num_tokens)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def percentile(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


def print_throughput(engine: sglang.Engine, rounds: int, concurrency: int, num_tokens: int) -> None:
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    shares: dict[str, list[float]] = {kind: [] for kind in KINDS}
    processor_shares: dict[str, list[float]] = {kind: [] for kind in KINDS}
    plain: list[Run] = []
    for params in ({}, *KINDS.values()):  # compiled and warm
        run(engine, params, 2, 4)
    plain.append(run(engine, {}, concurrency, num_tokens))
    for kind, params in [*KINDS.items()] * rounds:
        constrained = run(engine, params, concurrency, num_tokens)
        plain.append(run(engine, {}, concurrency, num_tokens))
        rates[kind].append(constrained.tokens_per_s)
        shares[kind].append(constrained.tokens_per_s / statistics.mean(each.tokens_per_s for each in plain[-2:]))
        beside = statistics.mean(each.processor_s for each in plain[-2:])
        processor_shares[kind].append(constrained.processor_s / beside)
    print(f"{'plain':<16} {statistics.median(each.tokens_per_s for each in plain):>8.0f} tokens/s")
    for kind in KINDS:
        rate, share = statistics.median(rates[kind]), statistics.median(shares[kind])
        processor = statistics.median(processor_shares[kind])
        print(f"{kind:<16} {rate:>8.0f} tokens/s {share:>8.1%} of plain, {processor:>6.1%} of its processor time")


def print_pauses(engine: sglang.Engine, rounds: int, num_tokens: int) -> None:
    numbers = itertools.count()
    alone: list[list[float]] = []
    beside: list[list[float]] = []
    for _ in range(rounds):
        alone.append(asyncio.run(pauses(engine, num_tokens)))
        beside.append(asyncio.run(pauses_beside_hostile(engine, num_tokens, numbers)))
    for name, runs in (("alone", alone), ("beside hostile", beside)):
        p50, p99 = (statistics.median(percentile(run, percent) for run in runs) for percent in (50, 99))
        print(f"{name:<16} p50 {p50 * 1e3:>7.1f} ms   p99 {p99 * 1e3:>7.1f} ms between tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--num-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    own, rest = parser.parse_known_args()
    flags = rest if "--model-path" in rest else ["--model-path", DEFAULT_MODEL_PATH, *rest]
    args = ServerArgs.from_cli([*flags, "--log-level", "critical"], "bench_grammar")
    with sglang.Engine(server_args=args) as engine:
        print_throughput(engine, own.rounds, own.concurrency, own.num_tokens)
        print_pauses(engine, own.rounds, own.num_tokens)


if __name__ == "__main__":
    main()
