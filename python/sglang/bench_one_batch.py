"""Latency of single batches on the model runner, without scheduler or server.

    python -m sglang.bench_one_batch --model-path DIR --batch-size 1 16 64 --input-len 1024 --output-len 64

Other options are the server's. Every step waits for the device. Prompts are computed in steps of at most
--chunked-prefill-size tokens, as the server does it; -1 computes all in one step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang.srt.environ import adopt_environment
from sglang.srt.errors import UserError
from sglang.srt.plan.layout import asked_layout
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.log import configure_logging

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_table import KVTable
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

WARMUP_DECODE_STEPS = 8
LOGGED_DECODE_STEPS = 5
CORRECTNESS_PROMPTS = (
    "The capital of France is",
    "The capital of the United Kingdom is",
    "Today is a sunny day and I like",
)


@dataclass(frozen=True, slots=True)
class BenchArgs:
    """Options of the benchmark itself; all others are the server's."""

    run_name: str
    batch_size: list[int]
    input_len: list[int]
    output_len: list[int]
    result_filename: str
    correctness_test: bool
    cut_len: int
    log_decode_step: int
    seed: int

    @staticmethod
    def parse(argv: Sequence[str]) -> tuple[BenchArgs, ServerArgs]:
        """Our options from the command line, and the server's from the rest. Raises UserError."""
        parser = argparse.ArgumentParser(
            prog="sglang.bench_one_batch", allow_abbrev=False, epilog="All options of the server are accepted too."
        )
        parser.add_argument("--run-name", default="default", help="Goes to the result file.")
        parser.add_argument("--batch-size", "--batch", type=int, nargs="+", default=[1])
        parser.add_argument("--input-len", type=int, nargs="+", default=[1024])
        parser.add_argument("--output-len", type=int, nargs="+", default=[16])
        parser.add_argument(
            "--result-filename", default="result.jsonl", help="Lines of JSON are appended; '' for none."
        )
        parser.add_argument("--correctness-test", action="store_true", help="Print greedy outputs of a few prompts.")
        parser.add_argument("--cut-len", type=int, default=4, help="Tokens that the correctness test computes first.")
        parser.add_argument("--log-decode-step", type=int, default=0, help="Print every Nth decode step.")
        parser.add_argument("--seed", type=int, default=0, help="Of the prompts.")
        options, rest = parser.parse_known_args(list(argv))
        return BenchArgs(**vars(options)), ServerArgs.from_cli(rest, "python -m sglang.bench_one_batch")


def _fit_server_args(args: ServerArgs, bench: BenchArgs) -> None:
    """Room for the largest batch, and a CUDA graph for exactly the sizes that are measured."""
    largest = max(bench.batch_size)
    if args.max_running_requests is None:
        args.max_running_requests = max(largest, len(CORRECTNESS_PROMPTS))
    if args.cuda_graph_bs is None and args.cuda_graph_max_bs is None:
        args.cuda_graph_bs = sorted(set(bench.batch_size))
    if args.chunked_prefill_size == -1:  # the memory plan must know how long one step gets
        args.max_prefill_tokens = max(args.max_prefill_tokens, largest * max(bench.input_len))


def _print(rank: int, line: str) -> None:
    if rank == 0:
        print(line, flush=True)


def measure(
    runner: ModelRunner, kv: KVTable, case: tuple[int, int, int], bench: BenchArgs, rank: int
) -> dict[str, Any]:
    """One (batch size, input length, output length), measured after a warm-up of the same shape."""
    from sglang.bench.direct import DirectBatch

    batch_size, input_len, output_len = case
    rng = np.random.default_rng(bench.seed)
    prompts = rng.integers(0, min(10_000, runner.plan.model.vocab_size), (batch_size, input_len)).tolist()
    chunk = runner.plan.chunked_prefill_size
    max_tokens = chunk if chunk > 0 else batch_size * input_len
    warm = DirectBatch(runner, kv, prompts, output_len)
    warm.prefill(max_tokens)
    for _ in range(min(WARMUP_DECODE_STEPS, output_len - 1)):
        warm.decode()
    warm.close()

    batch = DirectBatch(runner, kv, prompts, output_len)
    start = time.perf_counter()
    batch.prefill(max_tokens)
    prefill = time.perf_counter() - start
    _print(rank, f"Prefill. latency: {prefill:6.5f} s, throughput: {batch_size * input_len / prefill:9.2f} token/s")
    steps: list[float] = []
    for i in range(output_len - 1):
        start = time.perf_counter()
        batch.decode()
        steps.append(time.perf_counter() - start)
        if i < LOGGED_DECODE_STEPS or (bench.log_decode_step and i % bench.log_decode_step == 0):
            rate = batch_size / steps[-1]
            _print(
                rank,
                f"Decode {i}. Batch size: {batch_size}, latency: {steps[-1]:6.5f} s, throughput: {rate:9.2f} token/s",
            )
    batch.close()
    return _conclude(case, prefill, steps, rank)


def _conclude(case: tuple[int, int, int], prefill: float, steps: list[float], rank: int) -> dict[str, Any]:
    batch_size, input_len, output_len = case
    total = prefill + sum(steps)
    result = {
        "batch_size": batch_size,
        "input_len": input_len,
        "output_len": output_len,
        "prefill_latency": prefill,
        "prefill_throughput": batch_size * input_len / prefill,
        "total_latency": total,
        "overall_throughput": batch_size * (input_len + output_len) / total,
    }
    if steps:
        median = float(np.median(steps))
        result |= {"median_decode_latency": median, "median_decode_throughput": batch_size / median}
        _print(
            rank,
            f"Decode.  median latency: {median:6.5f} s, median throughput: {batch_size / median:9.2f} token/s",
        )
    _print(rank, f"Total. latency: {total:6.3f} s, throughput: {result['overall_throughput']:9.2f} token/s")
    return result


def check_outputs(runner: ModelRunner, kv: KVTable, args: ServerArgs, bench: BenchArgs, rank: int) -> list[list[int]]:
    """Greedy outputs of a few prompts, computed at once and in two parts; prints the texts, and a warning if the two
    ways differ. Raises UserError without a tokenizer."""
    from sglang.bench.direct import DirectBatch
    from sglang.srt.utils.hf_tokenizer import load_tokenizer

    tokenizer = load_tokenizer(args)
    if tokenizer is None:
        raise UserError("--correctness-test needs the tokenizer; leave out --skip-tokenizer-init")
    prompts = [tokenizer.encode(p) for p in CORRECTNESS_PROMPTS]
    output_len = bench.output_len[0]
    runs: list[list[list[int]]] = []
    for cut in (None, min(bench.cut_len, *(len(p) - 1 for p in prompts))):
        batch = DirectBatch(runner, kv, prompts, output_len)
        if cut is not None:
            batch.prefill(1 << 20, upto=cut)
        outputs = [[token] for token in batch.prefill(1 << 20)]
        for _ in range(output_len - 1):
            for output, token in zip(outputs, batch.decode(), strict=True):
                output.append(token)
        batch.close()
        runs.append(outputs)
    for i, (prompt, output) in enumerate(zip(prompts, runs[0], strict=True)):
        _print(rank, f"========= Prompt {i} =========\n{tokenizer.decode(prompt + output)}\n")
    if runs[0] != runs[1]:
        logger.warning("Outputs differ when the prompt is computed in two parts (rounding may do that): %s", runs)
    return runs[0]


def run_rank(args: ServerArgs, bench: BenchArgs, rank: int, rendezvous: str | None) -> None:
    """Everything that one rank does. Raises UserError."""
    ranks = asked_layout(args)
    configure_logging(args.log_level, ranks.name(rank) if ranks.world_size > 1 else "")
    from sglang.bench.direct import direct_table
    from sglang.srt.managers.scheduler.scheduler_setup import create_runner

    runner = create_runner(args, rank, rendezvous)
    kv = direct_table(runner)
    if bench.correctness_test:
        check_outputs(runner, kv, args, bench, rank)
        return
    for case in itertools.product(bench.batch_size, bench.input_len, bench.output_len):
        _print(rank, f"Benchmark. batch size: {case[0]}, input length: {case[1]}, output length: {case[2]}")
        try:
            result = measure(runner, kv, case, bench, rank)
        except UserError as error:
            _print(rank, f"skipped: {error}")
            continue
        if rank == 0 and bench.result_filename:
            with Path(bench.result_filename).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"run_name": bench.run_name, **result}) + "\n")


def run(args: ServerArgs, bench: BenchArgs) -> None:
    """Runs the benchmark, in this process for one rank, else in a process for each rank. Raises UserError."""
    _fit_server_args(args, bench)
    num_ranks = asked_layout(args).world_size
    if num_ranks == 1:
        run_rank(args, bench, 0, None)
        return
    with tempfile.TemporaryDirectory(prefix="sglang-bench-") as directory:
        rendezvous = f"file://{directory}/rendezvous"
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=run_rank, args=(args, bench, rank, rendezvous)) for rank in range(num_ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        failed = [i for i, p in enumerate(ranks) if p.exitcode]
        if failed:
            raise UserError(f"ranks {failed} failed; see above")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark and returns the exit status."""
    adopt_environment()
    try:
        bench, args = BenchArgs.parse(sys.argv[1:] if argv is None else argv)
        run(args, bench)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
