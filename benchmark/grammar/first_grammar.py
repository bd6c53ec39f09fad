"""What the first grammar of a server takes: time, processor time and memory.

    python benchmark/grammar/first_grammar.py [--rounds 3] [--model-path DIR] [server flags]

A server starts for each round without loading ahead what compiles grammars (SGLANG_GRAMMAR_WARM_UP=0); then one request
has a grammar, and another one a second grammar.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import NamedTuple

import psutil

import sglang
from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.server_args import ServerArgs


class Taken(NamedTuple):
    first_s: float
    second_s: float
    cpu_s: float
    mib: float


def processes() -> list[psutil.Process]:
    me = psutil.Process()
    return [me, *me.children(recursive=True)]


def totals() -> tuple[float, float]:
    """Seconds of processor time, MiB (pages that are shared count in parts)."""
    cpu, memory = 0.0, 0.0
    for process in processes():
        cpu += sum(process.cpu_times())  # with those of children that have ended
        memory += process.memory_full_info().pss / (1 << 20)
    return cpu, memory


def measure(args: ServerArgs) -> Taken:
    with sglang.Engine(server_args=args) as engine:
        engine.generate("Hi", {"max_new_tokens": 4})
        cpu_s, mib = totals()
        seconds = []
        for pattern in ("[ab]{4}", "[cd]{4}"):
            started = time.perf_counter()
            engine.generate("Hi", {"max_new_tokens": 8, "regex": pattern})
            seconds.append(time.perf_counter() - started)
        after_s, after_mib = totals()
        return Taken(*seconds, after_s - cpu_s, after_mib - mib)


def main() -> None:
    os.environ["SGLANG_GRAMMAR_WARM_UP"] = "0"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    options, flags = parser.parse_known_args()
    if "--model-path" not in flags:
        flags = ["--model-path", DEFAULT_MODEL_PATH, *flags]
    args = ServerArgs.from_cli([*flags, "--log-level", "critical"], "first_grammar")
    rounds = [measure(args) for _ in range(options.rounds)]
    for name, values in zip(Taken._fields, zip(*rounds, strict=True), strict=True):
        print(f"{name:10} {statistics.median(values):8.2f}   {' '.join(f'{value:.2f}' for value in values)}")


if __name__ == "__main__":
    main()
