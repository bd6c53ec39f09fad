#!/usr/bin/env python3
"""Times of one model's steps for each way in which its ranks add up: in the norm's kernel, before it, by NCCL.

    python benchmark/parallel/step_times.py --output rows.json [--turn FILE] --model-path DIR --tp 2 --load-format dummy

Other options are the server's. Weights are loaded once; graphs are captured again for each way. With --turn it says
FILE.ready when it could begin, and begins when there is a FILE: several of these can start side by side and be measured
one after the other. --one-way leaves out the other ways. The output has a row for each way and batch size; with
--profile also the kernels that take longest in a prompt, and those of a decode step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sglang import bench_one_batch
from sglang.bench.direct import DirectBatch, direct_table
from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.groups import Reducer
from sglang.srt.environ import adopt_environment
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.mem_cache.kv_table import KVTable
from sglang.srt.model_executor.graph_runner import GraphRunner, GraphSizes
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.plan.layout import asked_layout
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.log import configure_logging

INPUT_LEN, OUTPUT_LEN = 1024, 64
PROMPTS, LONG = 7, 8192
"""Times that one prompt of up to so many tokens is computed; the median counts. Longer ones are computed less often."""
KERNELS, LONGEST, DECODE = 9, "kernels of a prompt", "kernels of a decode step, batch "
DECODE_STEPS = 8
"""That are profiled together."""


@dataclass(frozen=True, slots=True)
class Order:
    """What a rank's process is told."""

    args: ServerArgs
    output: Path
    turn: Path | None
    profile: bool
    one_way: bool
    batch_sizes: tuple[int, ...]
    input_len: int
    output_len: int


class BeforeTheNorm:
    """A reducer that leaves the norm to its own kernel."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer

    def can_norm(self, x: torch.Tensor) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)


class NoReducer:
    def can_serve_tensor(self, x: torch.Tensor) -> bool:
        return False

    def can_norm(self, x: torch.Tensor) -> bool:
        return False

    def raise_if_stalled(self) -> None:
        pass


def ways() -> dict[str, Any]:
    """Name -> reducer, in the order in which they are measured; the first is what the server has chosen."""
    group = parallel_state.groups().tp
    if group.size == 1:
        return {"one rank" if parallel_state.num_ranks() == 1 else "stages": None}
    if group._reducer is None:
        return {"nccl": None}
    return {"in the norm": group._reducer, "before it": BeforeTheNorm(group._reducer), "nccl": NoReducer()}


def switch_to(runner: ModelRunner, reducer: Reducer, input_len: int) -> None:
    """Captures again what is measured here, and no more."""
    parallel_state.groups().tp.reduce_with(reducer)
    runner.graphs = None
    torch.cuda.empty_cache()
    prompts = [size for size in runner.plan.cuda_graph_prefill_tokens if size <= input_len][-1:]
    with torch.inference_mode():
        runner.graphs = GraphRunner(runner.state, GraphSizes(runner.plan.cuda_graph_bs, tuple(prompts), (0, 1)))


def one_prompt(runner: ModelRunner, kv: KVTable, input_len: int) -> Callable[[], None]:
    ids = min(10_000, runner.plan.model.vocab_size)
    tokens = np.random.default_rng(1).integers(0, ids, input_len).tolist()

    def compute() -> None:
        batch = DirectBatch(runner, kv, [tokens], 1)
        batch.prefill(input_len)
        batch.close()

    return compute


def seconds(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def profiled(run: Callable[[], None]) -> torch.profiler.profile:
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if torch.cuda.is_available() else activity.CPU]) as profile:
        run()
    return profile


def longest_kernels(run: Callable[[], None]) -> list[tuple[str, int, float]]:
    """(name, launches, milliseconds) of the kernels of `run`, the longest first."""
    rows = [(event.key[:60], event.count, event.device_time_total / 1000) for event in profiled(run).key_averages()]
    return sorted(rows, key=lambda row: -row[2])[:KERNELS]


def kernel_times(run: Callable[[], None], steps: int) -> list[tuple[str, int, float]]:
    """(name, launches, milliseconds) of the kernels of a step, the longest first. A kernel's time is what passes until
    the next begins, so that all of them are the whole, however early they begin; the device's waiting for the host is
    in the last one's."""
    device = torch.autograd.DeviceType.CUDA if torch.cuda.is_available() else torch.autograd.DeviceType.CPU
    events = [event for event in profiled(run).events() if event.device_type == device]
    events.sort(key=lambda event: event.time_range.start)
    rows: dict[str, tuple[int, float]] = {}
    for event, following in itertools.pairwise(events):
        count, total = rows.get(event.name[:60], (0, 0.0))
        passed = following.time_range.start - event.time_range.start
        rows[event.name[:60]] = count + 1, total + passed / 1000
    found = [(name, round(count / steps), total / steps) for name, (count, total) in rows.items()]
    return sorted(found, key=lambda row: -row[2])


def profile_decode(runner: ModelRunner, kv: KVTable, order: Order, batch_size: int) -> list[tuple[str, int, float]]:
    ids = min(10_000, runner.plan.model.vocab_size)
    prompts = np.random.default_rng(1).integers(0, ids, (batch_size, order.input_len)).tolist()
    batch = DirectBatch(runner, kv, prompts, order.output_len)
    batch.prefill(max(runner.plan.chunked_prefill_size, order.input_len))
    batch.decode()
    steps = min(DECODE_STEPS, order.output_len - 2)

    def decode() -> None:
        for _ in range(steps):
            batch.decode()

    rows = kernel_times(decode, steps)
    batch.close()
    return rows


def measure(runner: ModelRunner, kv: KVTable, order: Order, rank: int) -> None:
    """Writes what it has after each way."""
    bench, _ = bench_one_batch.BenchArgs.parse(["--model-path", "-", "--result-filename", ""])
    compute, found = one_prompt(runner, kv, order.input_len), dict[str, Any]()
    prompts = max(1, PROMPTS * LONG // max(LONG, order.input_len))
    choices = dict(list(ways().items())[: 1 if order.one_way else None])
    for number, (name, reducer) in enumerate(choices.items()):
        if number:
            switch_to(runner, reducer, order.input_len)
        cases = [(size, order.input_len, order.output_len) for size in order.batch_sizes]
        rows = [bench_one_batch.measure(runner, kv, case, bench, rank) for case in cases]
        found[name] = {
            "decode_ms": [row["median_decode_latency"] * 1e3 for row in rows],
            "prefill_ms": [row["prefill_latency"] * 1e3 for row in rows],
            "prompt_ms": float(np.median([seconds(compute) for _ in range(prompts)])) * 1e3,
        }
        if rank == 0:
            order.output.write_text(json.dumps(found, indent=1))
    if order.profile:
        if len(choices) > 1:
            switch_to(runner, next(iter(choices.values())), order.input_len)
        compute()
        if rank == 0:
            found[LONGEST] = longest_kernels(compute)
        else:
            compute()
        for size in order.batch_sizes:
            found[f"{DECODE}{size}"] = profile_decode(runner, kv, order, size)
        if rank == 0:
            order.output.write_text(json.dumps(found, indent=1))


def wait_for_turn(turn: Path, rank: int) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    parallel_state.wait_for_all_ranks()
    if rank == 0:
        Path(f"{turn}.ready").touch()
    while not turn.exists():
        time.sleep(0.02)


def run_rank(order: Order, rank: int, rendezvous: str | None) -> None:
    ranks = asked_layout(order.args)
    configure_logging(order.args.log_level, ranks.name(rank) if ranks.world_size > 1 else "")
    runner = create_runner(order.args, rank, rendezvous)
    kv = direct_table(runner)
    if order.turn is not None:
        wait_for_turn(order.turn, rank)
    measure(runner, kv, order, rank)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--turn", type=Path)
    parser.add_argument("--profile", action="store_true", help="Say which kernels a prompt takes longest in.")
    parser.add_argument("--one-way", action="store_true", help="Only what the server has chosen.")
    parser.add_argument("--batch-sizes", default="1,16,64")
    parser.add_argument("--lengths", default=f"{INPUT_LEN},{OUTPUT_LEN}", help="Tokens of a prompt and of an output.")
    options, rest = parser.parse_known_args()
    batch_sizes = tuple(map(int, options.batch_sizes.split(",")))
    input_len, output_len = map(int, options.lengths.split(","))
    adopt_environment()
    args = ServerArgs.from_cli(rest, "step_times.py")
    if args.max_running_requests is None:
        args.max_running_requests = max(batch_sizes)
    args.cuda_graph_bs = list(batch_sizes)
    order = Order(
        args, options.output, options.turn, options.profile, options.one_way, batch_sizes, input_len, output_len
    )
    num_ranks = asked_layout(args).world_size
    if num_ranks == 1:
        run_rank(order, 0, None)
        return 0
    with tempfile.TemporaryDirectory(prefix="sglang-bench-") as directory:
        context = multiprocessing.get_context("spawn")
        meeting = f"file://{directory}/rendezvous"
        ranks = [context.Process(target=run_rank, args=(order, rank, meeting)) for rank in range(num_ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    return 1 if any(process.exitcode for process in ranks) else 0


if __name__ == "__main__":
    sys.exit(main())
