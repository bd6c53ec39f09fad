#!/usr/bin/env python3
"""Tokens a second with and without drafts, of the scheduler and the model in one process, without HTTP.

    python lab/speculation/bench_drafts.py --model DIR [--accept-length 2.8] [--batch-sizes 1,8,32,64]
        [--input-len 512] [--output-len 192] [--out results.json] -- --speculative-algorithm EAGLE3 ... (server flags)

The flags behind `--` are a server's; those that begin with `--speculative-` are left out for the plain run. Weights may
be random (--load-format dummy): with --accept-length so many tokens of every step are taken, right or wrong. Prints the
ratio drafts / plain of output tokens a second, and what (accept length x plain) would be.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from typing import Any

import torch

from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_depth, create_runner
from sglang.srt.managers.wire.io_struct import TokenizedGenerateReq
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs


def measure(args: ServerArgs, sizes: list[int], input_len: int, output_len: int) -> dict[int, dict[str, float]]:
    """By batch size: output tokens a second behind the first tokens, and tokens a request and verified step."""
    runner = create_runner(args)
    scheduler = Scheduler(args, runner, StopChecker(None), create_depth(args, runner))
    results = {}
    for size in (sizes[0], *sizes):  # the first once to warm up
        results[size] = run(scheduler, size, input_len, output_len)
    runner.graphs = None
    del scheduler, runner
    gc.collect()
    torch.cuda.empty_cache()
    return results


def add_requests(scheduler: Scheduler, size: int, input_len: int, output_len: int, seed: int | None = None) -> None:
    """Requests of random tokens, which no earlier ones repeat unless they have the same seed."""
    vocab = scheduler.plan.model.vocab_size
    generator = torch.Generator().manual_seed(time.time_ns() if seed is None else seed)
    for i in range(size):
        ids = torch.randint(0, vocab, (input_len,), generator=generator).tolist()
        params = SamplingParams(temperature=0.0, max_new_tokens=output_len, ignore_eos=True)
        scheduler.add(
            TokenizedGenerateReq(rid=f"{time.perf_counter()}-{i}", input_ids=ids, sampling_params=params),
            i,
            frozenset(),
        )


def run(scheduler: Scheduler, size: int, input_len: int, output_len: int, seed: int | None = None) -> dict[str, float]:
    add_requests(scheduler, size, input_len, output_len, seed)
    while scheduler.waiting or scheduler.chunked:
        scheduler.step()
    scheduler.sync()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    before, started = scheduler.stats.num_generated, time.perf_counter()
    totals = scheduler.stats.drafts.since_start
    requests, correct = totals.requests, totals.correct
    while not scheduler.idle:
        scheduler.step()
        scheduler.outbox.clear()
    seconds = time.perf_counter() - started
    verified = totals.requests - requests
    length = 1 + (totals.correct - correct) / verified if verified else 1.0
    return {"tokens_per_s": (scheduler.stats.num_generated - before) / seconds, "accept_length": length}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--accept-length", type=float, default=0.0)
    parser.add_argument("--batch-sizes", default="1,8,32,64")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=192)
    parser.add_argument("--out")
    parser.add_argument("flags", nargs="*")
    options = parser.parse_args()
    sizes = [int(size) for size in options.batch_sizes.split(",")]
    flags = ["--model-path", options.model, "--skip-tokenizer-init", *options.flags]
    plain = without_drafts(flags)
    lengths = options.input_len, options.output_len
    results: dict[str, Any] = {"plain": measure(ServerArgs.from_cli(plain), sizes, *lengths)}
    if options.accept_length:
        os.environ["SGLANG_SIMULATE_ACC_LEN"] = str(options.accept_length)
    results["drafts"] = measure(ServerArgs.from_cli(flags), sizes, *lengths)
    print(f"{options.model} {' '.join(options.flags)}")
    print("requests | plain tokens/s | with drafts | ratio | accept length | of length x plain")
    for size in sizes:
        base, ours = (results[name][size] for name in ("plain", "drafts"))
        ratio = ours["tokens_per_s"] / base["tokens_per_s"]
        length = ours["accept_length"]
        print(
            f"{size:8} | {base['tokens_per_s']:14.1f} | {ours['tokens_per_s']:11.1f} | {ratio:5.2f} | {length:13.2f} |"
            f" {ratio / length:.2f}"
        )
    if options.out:
        with open(options.out, "w") as file:
            json.dump(results, file, indent=1)


def without_drafts(flags: list[str]) -> list[str]:
    """Without --speculative-* and their values."""
    kept: list[str] = []
    skips = False
    for flag in flags:
        if flag.startswith("--"):
            skips = flag.startswith("--speculative-")
        if not skips:
            kept.append(flag)
    return kept


if __name__ == "__main__":
    main()
