"""Throughput of many requests at once with a grammar each, beside the same without.

    python benchmark/grammar/bench_grammar.py [--concurrency 32] [--rounds 5] [--model-path DIR] [server flags]

Every request generates the same number of tokens. The two kinds take turns; printed are the best rounds.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

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
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "json schema": {"json_schema": json.dumps({"type": "array", "items": RECORD, "minItems": 100})},
    "regex": {"regex": "([a-z]+[ ,.])+"},
}


def tokens_per_s(engine: sglang.Engine, params: dict[str, Any], concurrency: int, num_tokens: int) -> float:
    prompts = [f"Write down record number {i} of the list:" for i in range(concurrency)]
    sampling = {"temperature": 0.8, "max_new_tokens": num_tokens, "ignore_eos": True, **params}
    start = time.perf_counter()
    results = engine.generate(prompts, [{**sampling, "sampling_seed": i} for i in range(concurrency)])
    seconds = time.perf_counter() - start
    return sum(r["meta_info"]["completion_tokens"] for r in results) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--num-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    own, rest = parser.parse_known_args()
    flags = rest if "--model-path" in rest else ["--model-path", DEFAULT_MODEL_PATH, *rest]
    args = ServerArgs.from_cli([*flags, "--log-level", "error"], "bench_grammar")
    best = dict.fromkeys(KINDS, 0.0)
    with sglang.Engine(server_args=args) as engine:
        for params in KINDS.values():  # compiled and warm
            tokens_per_s(engine, params, 2, 4)
        for _ in range(own.rounds):
            for kind, params in KINDS.items():
                best[kind] = max(best[kind], tokens_per_s(engine, params, own.concurrency, own.num_tokens))
    for kind, rate in best.items():
        print(f"{kind:<12} {rate:>10.0f} tokens/s {rate / best['plain']:>8.1%}")


if __name__ == "__main__":
    main()
