#!/usr/bin/env python3
"""Which kernels a server compiles after it is ready: every one of them holds up all requests once a machine.

    python benchmark/host/late_compiles.py --model DIR --logs DIR [--limit 160] [FLAGS OF THE SERVER...]

The server starts with an empty cache of Triton and random weights, and gets requests of many kinds one after the other.
Prints a line for each kind: the kernels that it made the server compile, with seconds, and how long it took. DIR holds
config.json and a tokenizer. Exits with 1 if any was compiled.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "evals"))
from served import first_gpu, served

SAID = re.compile(r"(\S+) was compiled while requests waited: ([0-9.]+) s")
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
SAMPLED = GREEDY | {"temperature": 1.0}


def tokens(count: int, first: int = 7) -> list[int]:
    return [7 + (i * 37 + first) % 900 for i in range(count)]


def ask(ids: list[int], **more: Any) -> dict[str, Any]:
    return {"input_ids": ids, "sampling_params": GREEDY} | more


def kinds(longest: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Names, and the requests of each that run at the same time."""
    yield "one token", [ask([11])]
    for count in (5, 16, 17, 64, 100, 1000, 1024):
        yield f"prompt of {count}", [ask(tokens(count, count))]
    yield "the same again", [ask(tokens(1000, 1000))]
    yield "behind a cached prefix", [ask(tokens(1000, 1000) + tokens(257, 3))]
    for count in (8192, 16384, 30000):
        if count + 600 <= longest:
            yield f"prompt of {count}", [ask(tokens(count, count))]
            yield f"257 behind cached {count}", [ask(tokens(count, count) + tokens(257, 3))]
            yield f"one behind cached {count}", [ask(tokens(count, count) + [5])]
    for count in (2, 3, 7, 16, 40):
        yield f"{count} at a time", [ask(tokens(40 + i, 100 * i)) for i in range(count)]
    filters = {"top_k": 20, "top_p": 0.8, "min_p": 0.05}
    yield "sampled", [ask(tokens(33), sampling_params=SAMPLED)]
    for name, value in filters.items():
        yield name, [ask(tokens(33), sampling_params=SAMPLED | {name: value})]
    yield "all filters, three at a time", [ask(tokens(33 + i), sampling_params=SAMPLED | filters) for i in range(3)]
    penalties = {"frequency_penalty": 0.2, "presence_penalty": 0.1, "repetition_penalty": 1.1}
    for name, value in penalties.items():
        yield name, [ask(tokens(33), sampling_params=GREEDY | {name: value})]
    yield "minimum of new tokens", [ask(tokens(33), sampling_params=GREEDY | {"min_new_tokens": 4})]
    yield "biased", [ask(tokens(33), sampling_params=GREEDY | {"logit_bias": {"5": 2.0}})]
    yield "logprobs", [ask(tokens(50), return_logprob=True, top_logprobs_num=3)]
    yield "logprobs of the prompt", [ask(tokens(51), return_logprob=True, logprob_start_len=0, top_logprobs_num=2)]
    yield "grammar", [ask(tokens(33), sampling_params=GREEDY | {"regex": "[a-z ]{4,}"})]
    yield (
        "grammar beside others",
        [
            ask(tokens(33), sampling_params=GREEDY | {"regex": "[a-z ]{4,}"}),
            *(ask(tokens(60 + i), sampling_params=SAMPLED | filters | penalties) for i in range(4)),
        ],
    )
    yield (
        "long outputs",
        [
            ask(tokens(20 + i, i), sampling_params=SAMPLED | {"max_new_tokens": 300, "temperature": 0.7})
            for i in range(5)
        ],
    )


def post(url: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            reply.read()
    except urllib.error.HTTPError as error:
        raise RuntimeError(error.read().decode()) from None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=160.0, help="seconds")
    args, flags = parser.parse_known_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    log, end, total = args.logs / f"late-{args.model.name}.log", time.monotonic() + args.limit, 0
    with tempfile.TemporaryDirectory() as cache:
        environment = first_gpu() | {"TRITON_CACHE_DIR": cache}
        with served(args.model, log, ["--load-format", "dummy", *flags], args.limit, **environment) as server:
            print(f"{args.model.name}: ready after {server.start_seconds:.0f} s", flush=True)
            info = server.info()
            longest = min(int(info["max_total_num_tokens"]), int(info["context_len"]))
            for name, requests in kinds(longest):
                if time.monotonic() > end:
                    print("its time was over")
                    break
                before, began = log.stat().st_size, time.monotonic()
                try:
                    with ThreadPoolExecutor(len(requests)) as pool:
                        list(pool.map(lambda body: post(server.url, body), requests))
                except RuntimeError as error:
                    print(f"{name}: {str(error)[:200]}")
                seconds = time.monotonic() - began
                with log.open(errors="replace") as file:
                    file.seek(before)
                    late = SAID.findall(file.read())
                total += len(late)
                if late:
                    what = ", ".join(f"{kernel} {took} s" for kernel, took in late)
                    print(f"{name} ({seconds:.2f} s): {what}", flush=True)
    print(f"{args.model.name}: {total} kernels compiled after the start")
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main())
