#!/usr/bin/env python3
"""What drafts cost and give in models of published shapes with random weights: no checkpoint is needed.

    python benchmark/speculation/bench_blocks.py [--only NAME,NAME] [--batch-sizes 1,8,32] [--out results.json]

Of each case (`draft_shapes.CASES`): tokens a second with and without drafts at a forced accept length, and the time on
the GPU of a step's two graphs, that which verifies and that which drafts. First all cases run at once with few layers,
so that their kernels are compiled side by side; then each is measured alone, in a process of its own. Prints one row a
case and batch size, and an error in place of the rows of a case that fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import draft_shapes

SIZES = "1,8,32"
LENGTHS = {True: (64, 8), False: (512, 128)}
"""Tokens of a prompt and of an answer; True: to compile only."""
COLUMNS = (
    "requests",
    "plain tokens/s",
    "with drafts",
    "ratio",
    "accept length",
    "verify ms",
    "draft ms",
    "draft share",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(draft_shapes.CASES), help="names of cases, with commas between them")
    parser.add_argument("--batch-sizes", default=SIZES)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda", help="cpu runs the cases with few layers, to try the script")
    parser.add_argument("--skip-compiling", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--compiling", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options)))
        return 0
    names, started = options.only.split(","), time.monotonic()
    if not options.skip_compiling:
        for process in [start(options, name, compiling=True) for name in names]:
            process.communicate()
        print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)
    results, failed = {}, 0
    for name in names:
        process = start(options, name, compiling=False)
        text, errors = process.communicate()
        if process.returncode:
            failed += 1
            print(f"\n{name}: failed\n{errors[-1500:]}", flush=True)
            continue
        results[name] = json.loads(text.splitlines()[-1])
        show(name, results[name])
    print(f"\n{time.monotonic() - started:.0f} s")
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))
    return min(failed, 1)


def start(options: argparse.Namespace, name: str, compiling: bool) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--one", name, "--device", options.device]
    command += ["--batch-sizes", options.batch_sizes, *(["--compiling"] if compiling else [])]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def show(name: str, result: dict[str, Any]) -> None:
    print(f"\n{name}: {draft_shapes.CASES[name].what} ({result['seconds']:.0f} s)")
    print(" | ".join(COLUMNS))
    for size, row in result["rows"].items():
        plain, drafts, parts = row["plain"], row["drafts"], row["parts"]
        share = f"{parts['draft'] / (parts['verify'] + parts['draft']):.0%}" if parts["verify"] else "-"
        cells = (
            size, f"{plain['tokens_per_s']:.1f}", f"{drafts['tokens_per_s']:.1f}",
            f"{drafts['tokens_per_s'] / plain['tokens_per_s']:.2f}", f"{drafts['accept_length']:.2f}",
            f"{parts['verify']:.2f}", f"{parts['draft']:.2f}", share,
        )  # fmt: skip
        print(" | ".join(cell.rjust(len(column)) for cell, column in zip(cells, COLUMNS, strict=True)), flush=True)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measures one case in this process."""
    started, case = time.monotonic(), draft_shapes.CASES[options.one]
    sizes = [int(size) for size in options.batch_sizes.split(",")]
    few = options.compiling or options.device == "cpu"
    with tempfile.TemporaryDirectory() as folder:
        flags = case.write(Path(folder), few)
        flags += ["--load-format", "dummy", "--skip-tokenizer-init", "--device", options.device]
        flags += ["--max-running-requests", str(max(sizes)), "--max-total-tokens", str(1024 * max(sizes))]
        flags += ["--context-length", "2048", "--skip-server-warmup"]
        if options.device == "cuda":
            flags += ["--cuda-graph-bs", *map(str, sizes), "--mem-fraction-static", "0.9"]
        plain = served(without_drafts(flags), sizes, options)
        os.environ["SGLANG_SIMULATE_ACC_LEN"] = str(case.accept_length)
        drafts = served(flags, sizes, options)
    rows = {size: {"plain": plain[size][0], "drafts": drafts[size][0], "parts": drafts[size][1]} for size in sizes}
    return {"rows": rows, "seconds": time.monotonic() - started}


def served(flags: list[str], sizes: list[int], options: argparse.Namespace) -> dict[int, Any]:
    """By batch size: tokens a second with the accept length, and milliseconds of the graphs."""
    import gc

    import torch
    from bench_drafts import run

    from sglang.srt.managers.scheduler.output import StopChecker
    from sglang.srt.managers.scheduler.scheduler import Scheduler
    from sglang.srt.managers.scheduler.scheduler_setup import create_runner
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs.from_cli(flags)
    runner = create_runner(args)
    scheduler = Scheduler(args, runner, StopChecker(None), None)
    clock = GraphClock(runner.graphs)
    lengths = LENGTHS[options.compiling or options.device == "cpu"]
    results = {}
    for size in (sizes[0], *sizes):  # the first once to warm up
        clock.forget()
        results[size] = run(scheduler, size, *lengths), clock.parts()
    runner.graphs = None
    del scheduler, runner, clock
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return results


class GraphClock:
    """Times the two graphs of every step without prompts, on the GPU, while they serve: that of the step, which
    verifies guesses, and that which follows the sampling and drafts. A run without graphs has no times."""

    def __init__(self, graphs: Any) -> None:
        self._events: dict[str, list[tuple[Any, Any]]] = {"verify": [], "draft": []}
        if graphs is None:
            return
        for shape in [shape for shape in graphs.graphs if not shape.has_prompts]:
            graphs.graphs[shape] = _TimedGraph(graphs.graphs[shape], self._events["verify"])
            if shape in graphs._settle:
                graphs._settle[shape] = _timed(graphs._settle[shape], self._events["draft"])

    def forget(self) -> None:
        for events in self._events.values():
            events.clear()

    def parts(self) -> dict[str, float]:
        """Milliseconds of each part, the median of all steps. Waits for the device."""
        result = {}
        for part, events in self._events.items():
            if events:
                events[-1][1].synchronize()
            result[part] = median([begin.elapsed_time(end) for begin, end in events] or [0.0])
        return result


class _TimedGraph:
    def __init__(self, graph: Any, events: list[Any]) -> None:
        self.replay = _timed(graph.replay, events)
        self.graph = graph


def _timed(function: Any, events: list[Any]) -> Any:
    import torch

    def call(*args: Any) -> Any:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = function(*args)
        end.record()
        events.append((begin, end))
        return result

    return call


def without_drafts(flags: list[str]) -> list[str]:
    from bench_drafts import without_drafts as without

    return without(flags)


if __name__ == "__main__":
    sys.exit(main())
