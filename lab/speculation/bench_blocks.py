#!/usr/bin/env python3
"""What drafts cost and give in models of published shapes with random weights: no checkpoint is needed.

    python lab/speculation/bench_blocks.py [--only NAME,NAME] [--peer-site DIR] [--out results.json]

Of each case (`draft_shapes.CASES`): tokens a second with and without drafts at a forced accept length, and the time on
the GPU of a step's two graphs, that which verifies and that which drafts. Names besides those of cases: `blocks` (block
drafts and MTP of sparse models), `chains` (EAGLE-3 and MTP of models that upstream SGLang serves, too), `records`
(predictions for SM120 beside published records, which need no GPU) and `tiny` (with `--device cpu`, to try the script).
First all cases run at once with few layers, so that their kernels are compiled side by side; then each is measured
alone, in a process of its own, for `--part-seconds` at most. With `--peer-site` (see benchmark/peers) both servers then
serve the models of `chains` over HTTP; where two GPUs are visible upstream starts on the last one meanwhile. Prints
each row as soon as it is known, with the kernels that were compiled while it was measured (there should be none), and
an error in place of the rest of a case that fails or takes too long.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import draft_shapes

CASES = {**draft_shapes.CASES, "tiny": draft_shapes.TINY}

LENGTHS = {True: (64, 8), False: (512, 128)}
"""Tokens of a prompt and of an answer; True: to compile only."""
RECORDS = "records"
GROUPS = {
    "blocks": [name for name, case in draft_shapes.CASES.items() if not case.beside_peer],
    "chains": [name for name, case in draft_shapes.CASES.items() if case.beside_peer],
}
COLUMNS = (
    "requests",
    "plain tokens/s",
    "with drafts",
    "ratio",
    "of length x plain",
    "accept length",
    "verify ms",
    "draft ms",
    "draft share",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="records,blocks", help="cases and groups, with commas between them")
    parser.add_argument("--batch-sizes", help="instead of each case's own")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda", help="cpu runs the cases with few layers, to try the script")
    parser.add_argument("--skip-compiling", action="store_true")
    parser.add_argument("--part-seconds", type=float, default=100, help="limit of each case's measurement")
    parser.add_argument("--compile-seconds", type=float, default=120, help="limit of compiling side by side")
    parser.add_argument("--peer-site", help="folder with upstream and its dependencies, for the cases of `chains`")
    parser.add_argument("--peer-seconds", type=float, default=260, help="a server that is not up then is left out")
    parser.add_argument("--logs", type=Path, default=Path(os.environ.get("OUT", tempfile.gettempdir())))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--compiling", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        measure(options)
        return 0
    asked = options.only.split(",")
    names = [name for group in asked if group != RECORDS for name in GROUPS.get(group, [group])]
    started, results, failed = time.monotonic(), {}, 0
    if names and not options.skip_compiling:
        compiling = [Part(options, name, options.compile_seconds, compiling=True) for name in names]
        if RECORDS in asked:
            records()
        late = [part.name for part in compiling if part.finish()]
        print(f"compiled in {time.monotonic() - started:.0f} s{', but not ' * bool(late)}{', '.join(late)}", flush=True)
    elif RECORDS in asked:
        records()
    for name in names:
        comparison = None
        if options.peer_site and CASES[name].beside_peer:
            from beside_peer import Comparison

            where = options.device, options.peer_site, options.logs
            comparison = Comparison(name, CASES[name], sizes_of(options, name), *where)
        try:
            part = Part(options, name, options.part_seconds)
            results[name] = show(name, part)
            failed += bool(part.finish())
            print(f"{part.errors()}{time.monotonic() - started:.0f} s in all", flush=True)
            if comparison is not None:
                results[name]["served"] = comparison.run(options.peer_seconds)
                print(f"{time.monotonic() - started:.0f} s in all", flush=True)
        finally:
            if comparison is not None:
                comparison.close()
        if options.out:
            options.out.write_text(json.dumps(results, indent=1))
    return min(failed, 1)


def records() -> None:
    from card_records import lines

    for line in lines():
        print(line, flush=True)


def sizes_of(options: argparse.Namespace, name: str) -> list[int]:
    return [int(size) for size in options.batch_sizes.split(",")] if options.batch_sizes else list(CASES[name].sizes)


class Part:
    """The process that runs one case, ended with all that it started when its time is over."""

    def __init__(self, options: argparse.Namespace, name: str, seconds: float, compiling: bool = False) -> None:
        command = [sys.executable, __file__, "--one", name, "--device", options.device]
        command += ["--batch-sizes", ",".join(map(str, sizes_of(options, name)))]
        self.name, self.limit, self._late = name, seconds, False
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process runs
        self.process = subprocess.Popen(
            [*command, *(["--compiling"] if compiling else [])],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        self._timer = threading.Timer(seconds, self._end)
        self._timer.start()

    def _end(self) -> None:
        self._late = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def finish(self) -> int:
        self.process.communicate()
        self._timer.cancel()
        return self.process.returncode

    def errors(self) -> str:
        """What went wrong, in lines; empty where nothing did."""
        if self._late:
            return f"{self.name}: not done within {self.limit:.0f} s\n"
        if not self.process.returncode:
            return ""
        self._errors.seek(0)
        return f"{self.name}: failed\n{self._errors.read()[-1500:]}\n"


def show(name: str, part: Part) -> dict[str, Any]:
    """Prints a row for each number of requests as soon as the part has told both of its runs."""
    print(f"\n{name}: {CASES[name].what}\n{' | '.join(COLUMNS)}", flush=True)
    plain: dict[str, Any] = {}
    drafts: dict[str, Any] = {}
    assert part.process.stdout is not None
    for line in part.process.stdout:
        if not line.startswith('{"run"'):
            if " was locked " in line:
                print(line, end="", flush=True)
            continue
        told = json.loads(line)
        size, rows = str(told["size"]), plain if told["run"] == "plain" else drafts
        if not told["warms_up"]:
            rows[size] = told
            if rows is drafts:
                _show_row(size, plain[size], told)
        for kernel, seconds in told["compiled"]:
            print(f"{size:>8} | {told['run']}: {kernel} was compiled in {seconds:.2f} s", flush=True)
    for size in plain:
        if size not in drafts:
            print(f"{size:>8} | {plain[size]['tokens_per_s']:>14.1f} | not measured", flush=True)
    return {"plain": plain, "drafts": drafts}


def _show_row(size: str, plain: dict[str, Any], drafts: dict[str, Any]) -> None:
    ratio, parts = drafts["tokens_per_s"] / plain["tokens_per_s"], drafts["parts"]
    share = f"{parts['draft'] / (parts['verify'] + parts['draft']):.0%}" if parts["verify"] else "-"
    cells = (
        size, f"{plain['tokens_per_s']:.1f}", f"{drafts['tokens_per_s']:.1f}", f"{ratio:.2f}",
        f"{ratio / drafts['accept_length']:.2f}", f"{drafts['accept_length']:.2f}", f"{parts['verify']:.2f}",
        f"{parts['draft']:.2f}", share,
    )  # fmt: skip
    print(" | ".join(cell.rjust(len(column)) for cell, column in zip(cells, COLUMNS, strict=True)), flush=True)


def measure(options: argparse.Namespace) -> None:
    """Measures one case in this process, and prints each result as a line of JSON."""
    case, sizes = CASES[options.one], sizes_of(options, options.one)
    few = options.compiling or options.device == "cpu"
    with tempfile.TemporaryDirectory() as folder:
        flags = case.write(Path(folder), few)
        flags += ["--load-format", "dummy", "--skip-tokenizer-init", "--device", options.device]
        flags += ["--max-running-requests", str(max(sizes)), "--max-total-tokens", str(1024 * max(sizes))]
        flags += ["--context-length", "2048", "--skip-server-warmup"]
        if options.device == "cuda":
            flags += ["--cuda-graph-bs", *map(str, sizes), "--mem-fraction-static", "0.9"]
        served("plain", without_drafts(flags), sizes, options)
        os.environ["SGLANG_SIMULATE_ACC_LEN"] = str(case.accept_length)
        served("drafts", flags, sizes, options)


def served(name: str, flags: list[str], sizes: list[int], options: argparse.Namespace) -> None:
    """Prints, for each number of requests, tokens a second with the accept length, and milliseconds of the graphs."""
    import gc

    import torch
    from bench_drafts import run

    from sglang.srt.kernels import late_compiles
    from sglang.srt.managers.scheduler.output import StopChecker
    from sglang.srt.managers.scheduler.scheduler import Scheduler
    from sglang.srt.managers.scheduler.scheduler_setup import create_runner
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs.from_cli(flags)
    runner = create_runner(args)
    scheduler = Scheduler(args, runner, StopChecker(None), None)
    clock = GraphClock(runner.graphs)
    lengths = LENGTHS[options.compiling or options.device == "cpu"]
    began = time.monotonic()
    if runner.copies is not None:  # locks main memory for prefixes, and a server is ready behind it
        runner.copies.wait_prepared()
        told = f"{options.one}, {name}: main memory was locked {time.monotonic() - began:.1f} s after the start"
        print(told, flush=True)
    late = late_compiles.watch()
    for number, size in enumerate((sizes[0], *sizes)):
        clock.forget()
        compiled = [] if late is None else late.kernels
        compiled.clear()
        result = run(scheduler, size, *lengths)
        told = {"run": name, "warms_up": not number, "size": size, **result, "parts": clock.parts()}
        print(json.dumps({**told, "compiled": compiled}), flush=True)
    runner.graphs = None
    del scheduler, runner, clock
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class GraphClock:
    """Times the two graphs of every step without prompts, on the GPU, while they serve: that of the step, which
    verifies draft tokens, and that which follows the sampling and drafts. A run without graphs has no times."""

    def __init__(self, graphs: Any) -> None:
        self._events: dict[str, list[tuple[Any, Any]]] = {"verify": [], "draft": []}
        if graphs is None:
            return
        for shape in [shape for shape in graphs.graphs if not shape.has_prompts]:
            graphs.graphs[shape] = _TimedGraph(graphs.graphs[shape], self._events["verify"])
            if shape in graphs._accept:
                graphs._accept[shape] = _timed(graphs._accept[shape], self._events["draft"])

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
