#!/usr/bin/env python3
"""Where a round of drafting spends its time, kernel by kernel, beside a plain step of the same model.

    python benchmark/speculation/profile_round.py --case qwen3.5-35b-mtp [--batch-sizes 1,64] [--few-layers] [--out F]

A round verifies draft tokens, keeps what stands and drafts again. For each case of `draft_shapes`, plain and with
drafts and for each number of requests: tokens a second, milliseconds of a round, how much of it the GPU computes, and
the kernels that take most of it (launches and microseconds of a round, by torch's profiler). Needs a GPU. Kernels that
are compiled while a run is measured are named with the stack that waits for them: there should be none.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import draft_shapes
import torch
from bench_drafts import add_requests, run, without_drafts

from sglang.srt.kernels import late_compiles
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.server_args import ServerArgs

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
PROFILED_ROUNDS = 12
SLOW_S = 1.5
"""A run of decoding that takes longer says where it stands."""


@dataclass(frozen=True, slots=True)
class Round:
    """Milliseconds from a round to the next, of which the GPU computes `busy_ms`; kernels: name -> (launches,
    microseconds) of a round."""

    ms: float
    busy_ms: float
    launches: float
    kernels: dict[str, tuple[float, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", required=True)
    parser.add_argument("--batch-sizes", default="1,64")
    parser.add_argument("--few-layers", action="store_true")
    parser.add_argument("--rows", type=int, default=14, help="kernels that are printed")
    parser.add_argument("--only", default="plain,drafts")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    case, sizes = draft_shapes.CASES[options.case], [int(size) for size in options.batch_sizes.split(",")]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        flags = case.write(Path(folder), options.few_layers) + ["--load-format", "dummy", "--skip-tokenizer-init"]
        flags += ["--max-running-requests", str(max(sizes)), "--max-total-tokens", str(1024 * max(sizes))]
        flags += ["--context-length", "2048", "--skip-server-warmup", "--mem-fraction-static", "0.9"]
        flags += ["--cuda-graph-bs", *map(str, sizes)]
        for name in options.only.split(","):
            if name == "drafts":
                os.environ["SGLANG_SIMULATE_ACC_LEN"] = str(case.accept_length)
            asked = flags if name == "drafts" else without_drafts(flags)
            results[name] = measure(f"{options.case}, {name}", asked, sizes, options.rows)
            if options.out:
                options.out.write_text(json.dumps(results, indent=1))


def measure(title: str, flags: list[str], sizes: list[int], rows: int) -> dict[str, Any]:
    args = ServerArgs.from_cli(flags)
    runner = create_runner(args)
    scheduler = Scheduler(args, runner, StopChecker(None), None)
    if runner.copies is not None:
        runner.copies.wait_prepared()
    late, results = late_compiles.watch(), {}
    for size in sizes:
        for seed, attempt in enumerate(("warms up", "again", "the same prompts again")):
            faulthandler.dump_traceback_later(SLOW_S, exit=False)
            rate = run(scheduler, size, 512, 128, min(seed, 1))
            faulthandler.cancel_dump_traceback_later()
            print(f"{title}, {size} requests ({attempt}): {rate['tokens_per_s']:.1f} tokens/s", flush=True)
            for kernel, seconds in [] if late is None else late.kernels:
                print(f"  compiled meanwhile: {kernel} in {seconds:.2f} s", flush=True)
            if late is not None:
                late.kernels.clear()
        of_round = profiled(scheduler, size)
        results[size] = {**rate, "ms": of_round.ms, "busy_ms": of_round.busy_ms, "kernels": of_round.kernels}
        show(of_round, size * rate["accept_length"] / rate["tokens_per_s"] * 1000, rows)
    if runner.graphs is not None:
        print(f"times of steps as the depth is chosen by: {runner.step_times()}", flush=True)
    runner.graphs = None
    del scheduler, runner
    gc.collect()
    torch.cuda.empty_cache()
    return results


def profiled(scheduler: Scheduler, size: int) -> Round:
    add_requests(scheduler, size, 512, 128)
    while scheduler.waiting or scheduler.chunked:
        scheduler.step()
    for _ in range(3):
        scheduler.step()
    scheduler.sync()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED_ROUNDS):
            scheduler.step()
            scheduler.outbox.clear()
        torch.cuda.synchronize()
    while not scheduler.idle:
        scheduler.step()
        scheduler.outbox.clear()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    return summed([event for event in events if event.get("cat") in ON_DEVICE])


def summed(events: list[dict[str, Any]]) -> Round:
    """Of PROFILED_ROUNDS rounds."""
    kernels: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    busy, end = 0.0, 0.0
    events.sort(key=lambda event: event["ts"])
    for event in events:
        begin, until = event["ts"], event["ts"] + event["dur"]
        busy += max(0.0, until - max(begin, end))
        end = max(end, until)
        entry = kernels[event["name"]]
        entry[0] += 1
        entry[1] += event["dur"]
    span, rounds = (end - events[0]["ts"]) / 1000, PROFILED_ROUNDS
    by_time = sorted(kernels.items(), key=lambda item: -item[1][1])
    return Round(
        span / rounds,
        busy / 1000 / rounds,
        len(events) / rounds,
        {name: (count / rounds, us / rounds) for name, (count, us) in by_time},
    )


def show(of_round: Round, ms: float, rows: int) -> None:
    print(
        f"  a round: {ms:.2f} ms (profiled {of_round.ms:.2f} ms, of which the GPU computes {of_round.busy_ms:.2f} ms,"
        f" {of_round.launches:.0f} launches)"
    )
    for name, (count, us) in list(of_round.kernels.items())[:rows]:
        print(f"  {us:9.0f} us {count:7.1f} x {name[:70]}", flush=True)


if __name__ == "__main__":
    started = time.monotonic()
    main()
    print(f"{time.monotonic() - started:.0f} s in all")
