#!/usr/bin/env python3
"""Servers as an owner starts them: recipes and published commands with their own flags, and with none.

    python scripts/first_hour.py --out DIR [--limit 560] [--all] [--only TEXT] [--sanitize memcheck] [--list]

Each case is a published config cut to a few layers (real widths and format, random weights), or the embedded model with
one of its drafts. The server must start, canary included, with the graphs that its flags ask for, answer 32 requests of
many lengths, 16 at a time, without an error, a traceback or a kernel compiled while they wait, and end when it is told
to. Flags that lay out several GPUs are left out, and the size of the cache is given, so that several servers fit beside
each other; each has one of the GPUs that CUDA_VISIBLE_DEVICES names, or that there are. Prints a row for each case,
writes its log to DIR, and exits with 1 if one failed or was not reached.

Without --all each architecture has one recipe, one that drafts and one published command.
--sanitize runs every server under compute-sanitizer with that tool.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "test")]

GIB = 1 << 30
REQUESTS, AT_ONCE, NEW_TOKENS = 32, 16, 24
CACHE_TOKENS = 1 << 17
BESIDE_PLAN = 3 * GIB
"""Memory of a server that its plan does not count: the context, libraries, and what a start needs for a while."""
MIN_S = 30.0
"""No server is started that has less time left."""
START_LIMIT_S, ANSWER_LIMIT_S, EXIT_LIMIT_S = 300.0, 180.0, 40.0
LARGE = ("DeepSeek-V4.1-Flash",)
"""Configs that take most of a GPU even with a few layers."""
PATIENCE_S = 60.0
"""A case that has waited so long for memory goes before smaller ones that came after it."""
SANITIZED_FACTOR = 4
"""So many times the limits for a server under compute-sanitizer."""
LAYOUT_FLAGS = re.compile(
    r"--(tp|tp-size|tensor-parallel-size|dp|dp-size|data-parallel-size|attn-dp-size|ep|ep-size|expert-parallel-size"
    r"|pp-size|pipeline-parallel-size|dcp-size|nnodes|node-rank|dist-init-addr|host|port|mem-fraction-static"
    r"|max-total-tokens|speculative-dspark-sps-table-path)$"
)
"""Flags with a value that say on how many GPUs, where and in how much memory a server runs."""
LAYOUT_SWITCHES = ("--enable-dp-attention", "--enable-dp-lm-head", "--enable-two-batch-overlap")
BAD_LINES = re.compile(r"Traceback \(most recent|while requests waited|illegal memory|CUDA error")
"""A kernel that is read late from the cache, which all servers share, is one that an owner's server compiles late."""
SANITIZER = ("compute-sanitizer", "--target-processes", "all", "--tool")
SANITIZER_FLAGS = {"racecheck": ("--kernel-name", "kns=_kernel", "--kernel-name-exclude", "kns=_ZN")}
"""The kernels of the server are looked at: for those of the libraries the tool takes more memory than the host has."""
SANITIZER_ERRORS = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")


@dataclass(frozen=True)
class Case:
    """config: of a published model; empty: the embedded model. A published command has its flags by its name."""

    name: str
    config: str
    flags: tuple[str, ...] = ()
    kind: str = "embedded"


@dataclass
class Result:
    case: Case
    problems: list[str] = field(default_factory=list)
    start_s: float = 0.0
    answer_s: float = 0.0
    reached: bool = False

    def refuse(self, why: str) -> None:
        self.reached, self.problems = True, [why]

    def row(self) -> str:
        if not self.reached:
            return f"{self.case.name:<42} not reached"
        word = "FAILED" if self.problems else "ok"
        return f"{self.case.name:<42} {word:<7} {self.start_s:6.0f} {self.answer_s:6.0f}  {'; '.join(self.problems)}"


def on_one_gpu(flags: Sequence[str]) -> tuple[str, ...]:
    """Returns the flags without those of a layout of several GPUs, of addresses and of shares of memory."""
    kept: list[str] = []
    words = iter(flags)
    for word in words:
        name, equals, _ = word.partition("=")
        if LAYOUT_FLAGS.match(name):
            if not equals:
                next(words, None)
        elif word not in LAYOUT_SWITCHES:
            kept.append(word)
    return tuple(kept)


def embedded_cases() -> Iterator[Case]:
    for algorithm in ("NEXTN", "EAGLE3", "DFLASH", "NGRAM"):
        yield Case(f"embedded {algorithm}", "", ("--speculative-algorithm", algorithm))
        few = ("--speculative-algorithm", algorithm, "--cuda-graph-max-bs", "8")
        yield Case(f"embedded {algorithm}, small graphs", "", few)
    yield Case("embedded", "")
    yield Case("embedded, two tiers", "", ("--enable-hierarchical-cache", "--page-size", "16"))


def recipe_cases() -> Iterator[Case]:
    """The models of the recipes: with the flags of their commands, and, where the checkpoint has layers that draft,
    with these and nothing else."""
    from docs.recipes import CONFIGS, recipe_flags

    for model, config in CONFIGS.items():
        yield Case(model, config, on_one_gpu(recipe_flags(model) or ()), "recipe")
        if drafts_for_itself(config):
            yield Case(f"{model}, drafts", config, ("--speculative-algorithm", "NEXTN"), "drafts")


def published_cases() -> Iterator[Case]:
    from commands.published import AS_TYPED, COMMANDS, NOT_SERVED, OTHER_FLAWS

    for name, row in COMMANDS.items():
        if name not in (*NOT_SERVED, *OTHER_FLAWS, *AS_TYPED):
            yield Case(name, row["config"], kind="published")


def drafts_for_itself(config: str) -> bool:
    """Returns whether the plan finds layers in the config that draft for the model."""
    from sglang.srt.errors import UserError

    try:
        return planned(Case("", config, ("--speculative-algorithm", "NEXTN")), "sm_120") is not None
    except UserError:
        return False


def command_flags(case: Case, folder: Path) -> list[str]:
    """Returns the flags of the server: the model's directory, which is written, and the case's own."""
    from commands.configs import checkpoint
    from commands.cut import write_cut
    from commands.published import COMMANDS, words_of

    from sglang.cli import with_model

    tokens = ("--max-total-tokens", str(CACHE_TOKENS))
    if not case.config:
        return with_model([*tokens, *case.flags])
    model = write_cut(checkpoint(case.config, folder / "published"), folder / "cut")
    fixed = ["--load-format", "dummy", *tokens]
    if case.name in COMMANDS:
        return [*fixed, *on_one_gpu(words_of(case.name, model, folder / "draft"))]
    return ["--model-path", str(model), *fixed, *case.flags]


def planned(case: Case, arch: str | None) -> int | None:
    """Returns the bytes of the GPU that the plan counts, on a named GPU or this one; None: it has no kernels for it.
    Raises UserError for what is refused."""
    from sglang import explain
    from sglang.srt.hardware.arch import arch_by_name, current_arch
    from sglang.srt.server_args import ServerArgs

    with tempfile.TemporaryDirectory() as folder:
        args = ServerArgs.from_cli(command_flags(case, Path(folder)))
        explained = explain.explain(args, current_arch() if arch is None else arch_by_name(arch), frozenset({"triton"}))
    if explained.plan is None:
        return None
    return sum(size for name, size in explained.plan["memory"].items() if name != "available")


class Memory:
    """The memory of each GPU: a server waits until one of them has as much free as it needs. Small servers pass large
    ones, until one of those has waited for PATIENCE_S."""

    def __init__(self, total: Mapping[str, int]) -> None:
        self.largest, self.free, self.changed = max(total.values()), dict(total), threading.Condition()
        self.waiting: list[float] = []

    def take(self, size: int, until: float) -> str | None:
        """Returns the GPU with the most free memory, from which `size` is taken; None if the time is over."""
        came = time.monotonic()
        with self.changed:
            self.waiting.append(came)
            try:
                if not self.changed.wait_for(lambda: self._may_take(size, came), max(0.0, until - came)):
                    return None
                gpu, free = self._freest()
                self.free[gpu] = free - size
            finally:
                self.waiting.remove(came)
                self.changed.notify_all()
        return gpu

    def _may_take(self, size: int, came: float) -> bool:
        first = min(self.waiting)
        return self._freest()[1] >= size and (first == came or time.monotonic() - first < PATIENCE_S)

    def _freest(self) -> tuple[str, int]:
        return max(self.free.items(), key=lambda each: each[1])

    def give_back(self, gpu: str, size: int) -> None:
        with self.changed:
            self.free[gpu] += size
            self.changed.notify_all()


def visible_gpus() -> dict[str, int]:
    """Returns the name of each GPU, as CUDA_VISIBLE_DEVICES has it, and the bytes that servers may have of it."""
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = range(torch.cuda.device_count())
    names = given.split(",") if given else map(str, numbers)
    sizes = [torch.cuda.get_device_properties(number).total_memory - 4 * GIB for number in numbers]
    return dict(zip(names, sizes, strict=True))


class Server:
    """A server in a process group of its own."""

    def __init__(self, flags: Sequence[str], gpu: str, log: Path, sanitize: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        checker = [*SANITIZER, sanitize, *SANITIZER_FLAGS.get(sanitize, ())] if sanitize else []
        command = [*checker, sys.executable, "-m", "sglang.cli", "serve", "--port", str(self.port), *flags]
        paths = os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])
        env = os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": gpu}
        self.sanitized = bool(sanitize)
        with log.open("wb") as out:
            out.write((shlex.join(command) + "\n").encode())
            out.flush()
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)

    def wait_up(self, until: float) -> bool:
        while time.monotonic() < until and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return True
            except (OSError, http.client.HTTPException):
                time.sleep(0.3)
        return False

    def ask(self, number: int, limit_s: float) -> str:
        """Sends request `number`, of a length of its own, every other one streamed. Returns what was wrong, or ""."""
        words = " ".join(str(number * 7919 + i) for i in range(1 + (number % 8) ** 3))
        body: dict[str, Any] = {
            "model": "m",
            "prompt": words,
            "max_tokens": NEW_TOKENS,
            "temperature": 0.0 if number % 4 else 0.8,
            "ignore_eos": True,
            "stream": number % 2 == 0,
        }
        url, headers = f"http://127.0.0.1:{self.port}/v1/completions", {"Content-Type": "application/json"}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=limit_s) as answer:
                text = answer.read().decode()
        except (OSError, http.client.HTTPException) as error:  # the second: an answer that is cut off
            return f"{type(error).__name__}: {error}"
        end = "[DONE]" if body["stream"] else '"finish_reason":"length"'
        whole = end in text and '"error"' not in text
        return "" if whole else text[-200:]

    def end(self, limit_s: float) -> str:
        """Ends the server as a supervisor would. Returns what was wrong, if anything."""
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended by itself, with a status that says why
            for process in self._servers():
                process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(limit_s)
            own = status and not self.sanitized  # the sanitizer's is 1 for a process that it did not see end
            return f"ended with status {status}" if own else ""
        except subprocess.TimeoutExpired:
            return f"did not end within {limit_s:.0f} s"
        finally:
            self.kill()

    def _servers(self) -> list[psutil.Process]:
        """The process that serves: the sanitizer's child, as the tool itself writes its summary behind it."""
        own = psutil.Process(self.process.pid)
        return own.children() if self.sanitized else [own]

    def kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


def play(result: Result, flags: Sequence[str], gpu: str, log: Path, sanitize: str, until: float) -> None:
    """Starts the server of a case, asks it, ends it, and reads its log."""
    slower = SANITIZED_FACTOR if sanitize else 1
    began, server = time.monotonic(), Server(flags, gpu, log, sanitize)
    try:
        if not server.wait_up(min(until, began + START_LIMIT_S * slower)):
            status = server.process.poll()
            result.reached = status is not None or time.monotonic() < until
            result.problems.append("did not come up in time" if status is None else f"start ended with {status}")
            return
        result.reached = True
        result.start_s = time.monotonic() - began
        asked = time.monotonic()
        limit_s = max(1.0, min(ANSWER_LIMIT_S * slower, until - asked))
        with ThreadPoolExecutor(AT_ONCE) as pool:
            wrong = [text for text in pool.map(lambda n: server.ask(n, limit_s), range(REQUESTS)) if text]
        result.answer_s = time.monotonic() - asked
        if wrong:
            result.problems.append(f"{len(wrong)} of {REQUESTS} answers: {wrong[0]}")
        if problem := server.end(EXIT_LIMIT_S * slower):
            result.problems.append(problem)
    finally:
        server.kill()
        text = log.read_text(errors="replace")
        result.problems += log_problems(text)
        if sanitize and result.reached and not SANITIZER_ERRORS.search(text):
            result.problems.append("no summary of the sanitizer")


def log_problems(text: str) -> list[str]:
    """Returns what a server's log says that no owner should read."""
    found = [line.strip()[:160] for line in text.splitlines() if BAD_LINES.search(line)]
    errors = sum(int(count) for count in SANITIZER_ERRORS.findall(text))
    return found[:2] + ([f"{errors} errors of the sanitizer"] if errors else [])


def run_all(cases: Sequence[Case], out: Path, limit_s: float, jobs: int, sanitize: str) -> list[Result]:
    memory = Memory(visible_gpus())
    places, until = threading.BoundedSemaphore(jobs), time.monotonic() + limit_s
    results = [Result(case) for case in cases]

    def one(result: Result, folder: Path) -> None:
        """A case waits for memory before it waits for a place, so that small ones pass large ones."""
        try:
            size, flags = planned(result.case, None), command_flags(result.case, folder)
        except Exception as error:  # one case must not end the others
            result.refuse(f"no plan: {type(error).__name__}: {str(error)[:300]}")
            return
        if size is None:
            result.refuse("no kernel serves it on this GPU")
            return
        size = min(size + BESIDE_PLAN, memory.largest)
        gpu = memory.take(size, until - MIN_S)
        if gpu is None:
            return
        try:
            with places:
                if time.monotonic() < until - MIN_S:
                    log = out / f"{re.sub(r'[^A-Za-z0-9.]+', '-', result.case.name)}.log"
                    play(result, flags, gpu, log, sanitize, until)
        finally:
            memory.give_back(gpu, size)

    def run(number: int) -> None:
        folder = out / "models" / str(number)
        try:
            one(results[number], folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            print(results[number].row(), flush=True)

    with ThreadPoolExecutor(3 * jobs) as pool:
        for future in [pool.submit(run, number) for number in range(len(cases))]:
            future.result()
    return results


def cases_of(every: bool) -> list[Case]:
    """Returns all cases, or of each architecture the first of each kind: those that need most of a GPU first, as
    smaller ones pass whoever waits, and the embedded ones last."""
    cases = sorted([*published_cases(), *recipe_cases(), *embedded_cases()], key=lambda case: case.config not in LARGE)
    if every:
        return cases
    first: dict[tuple[str, str], Case] = {}
    for case in cases:
        first.setdefault((case.kind, architecture(case) if case.config else case.name), case)
    return [*first.values()]


def architecture(case: Case) -> str:
    from commands.configs import checkpoint

    with tempfile.TemporaryDirectory() as folder:
        config = json.loads((checkpoint(case.config, Path(folder)) / "config.json").read_text())
    return str(config["architectures"][0])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / ".first_hour")
    parser.add_argument("--limit", type=float, default=560.0, help="seconds for everything")
    jobs = max(4, (os.cpu_count() or 4) - 2)  # a start compiles kernels with one thread
    parser.add_argument("--jobs", type=int, default=jobs, help="servers at a time, as the GPU's memory allows")
    parser.add_argument("--all", action="store_true", help="every recipe and published command")
    parser.add_argument("--only", default="", help="of all cases those whose name matches this pattern")
    parser.add_argument("--skip", default="$^", help="but not those whose name matches this one")
    parser.add_argument("--sanitize", default="", choices=("", "memcheck", "initcheck", "racecheck", "synccheck"))
    parser.add_argument("--list", action="store_true", help="print the cases and their flags, and run none")
    args = parser.parse_args(argv)
    cases = [
        case
        for case in cases_of(args.all or bool(args.only))
        if re.search(args.only, case.name) and not re.search(args.skip, case.name)
    ]
    if args.list:
        print(*(f"{case.name}\t{case.config}\t{shlex.join(case.flags)}" for case in cases), sep="\n")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    results = run_all(cases, args.out, args.limit, args.jobs, args.sanitize)
    failed = [result for result in results if result.problems or not result.reached]
    print(f"\n{'case':<42} {'':<7} {'start':>6} {'answer':>6}  s", *(r.row() for r in results), sep="\n")
    print(f"{len(results) - len(failed)} of {len(results)} cases hold")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
