#!/usr/bin/env python3
"""Two GPUs of one machine beside one of them: right answers, times of steps, throughput, failure. About seven minutes.

    python benchmark/parallel/two_gpus.py --experts DIR [--slice DIR] --out DIR [--limit 450] [--skip rounds,ranks]

`--experts`: a model whose steps are timed and which is served, with one rank and with two; `--slice`: one whose steps
are timed with two ranks. Weights are random. Installs sgl-kernel for this GPU into a folder of --out. What takes long
to start starts side by side; what is timed runs alone. Every part has a limit; what fails is said, the rest goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "evals")]

import api  # noqa: E402
import bench_tiny  # noqa: E402
import requirements  # noqa: E402
from served import OURS, ROOT, Server, checkout_env, first_gpu, nth_gpu, served  # noqa: E402

EMBEDDED = ROOT / "python" / "sglang" / "embedded" / "tiny"
READY_LIMIT_S, TURN_LIMIT_S, SERVER_LIMIT_S = 170.0, 75.0, 170.0
LOADS = ((64, 512), (256, 1024))
"""Requests at a time, and in all."""
SERVER_LENGTHS = (512, 128)
LOAD_LIMIT_S = 240.0
"""Seconds for a load, in which another server may compile."""
SMALL_SERVER = ("--max-total-tokens", "65536", "--max-running-requests", "32", "--cuda-graph-max-bs", "32")
SERVER = ("--load-format", "dummy", "--max-total-tokens", "220000", "--max-running-requests", "512")
SERVER = (*SERVER, "--cuda-graph-max-bs", "256", "--chunked-prefill-size", "8192")
BENCH = ("--load-format", "dummy", "--max-total-tokens", "72000", "--chunked-prefill-size", "8192")


class Window:
    """What is left of the time, and where everything is written."""

    def __init__(self, out: Path, limit: float) -> None:
        self.out, self.end, self.started = out, time.monotonic() + limit, time.monotonic()
        self.failures: list[str] = []

    def left(self, maximum: float) -> float:
        return max(1.0, min(maximum, self.end - time.monotonic()))

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:4.0f} s] {text}", flush=True)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A failure inside is one line, and no more. Behind the end every wait inside is a second."""
        try:
            yield
        except Exception as error:
            self.fail(f"{name}: {type(error).__name__}: {str(error)[-600:]}")

    def fail(self, text: str) -> None:
        self.failures.append(text)
        self.say(f"FAILED {text}")


def install_kernels(window: Window) -> None:
    """Into a folder of the window, where an earlier run may have left it."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    arch = "120f" if major == 12 else f"{major}{minor}{'a' if major >= 9 else ''}"
    site, started = window.out / "site", time.monotonic()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    if site.exists():
        return
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(site)]
    done = subprocess.run(
        [*command, str(ROOT / "sgl-kernel")], env={**os.environ, "SGL_KERNEL_ARCHS": arch},
        capture_output=True, text=True, timeout=window.left(120), check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr)
    window.say(f"sgl-kernel for {arch} installed in {time.monotonic() - started:.0f} s")


# --- times of steps --------------------------------------------------------------------------------------------------


@dataclass
class StepTimes:
    """A process of step_times.py that waits for its turn. Flags are the script's and the server's."""

    name: str
    window: Window
    process: subprocess.Popen[bytes]

    @staticmethod
    def start(name: str, window: Window, model: str, *flags: str, gpu: str | None = None) -> StepTimes:
        base = window.out / name.replace(" ", "_")
        for stale in (".turn", ".turn.ready", ".json"):
            Path(f"{base}{stale}").unlink(missing_ok=True)
        command = [sys.executable, "-W", "ignore", str(HERE / "step_times.py"), "--output", f"{base}.json"]
        command += ["--turn", f"{base}.turn", "--model-path", model, *BENCH, *flags]
        env = checkout_env() if gpu is None else checkout_env(CUDA_VISIBLE_DEVICES=gpu)
        with Path(f"{base}.log").open("wb") as log:
            return StepTimes(
                name, window, subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)
            )

    def _file(self, kind: str) -> Path:
        return self.window.out / f"{self.name.replace(' ', '_')}.{kind}"

    def wait_until_ready(self, end: float) -> None:
        ready = self._file("turn.ready")
        while not ready.exists():
            if self.process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise RuntimeError(f"not ready: {_end_of(self._file('log'))}")
            time.sleep(0.1)

    def measure(self) -> dict[str, Any]:
        self._file("turn").touch()
        try:
            status = self.process.wait(self.window.left(TURN_LIMIT_S))
        except subprocess.TimeoutExpired:
            status = -1
        self.kill()
        result = self._file("json")
        if not result.exists():
            raise RuntimeError(f"status {status}: {_end_of(self._file('log'))}")
        rows: dict[str, Any] = json.loads(result.read_text())
        return rows

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-500:]


def say_steps(window: Window, name: str, rows: dict[str, Any]) -> None:
    for way, row in rows.items():
        if way.startswith("kernels of"):
            continue
        decode, prefill = ("/".join(f"{ms:.2f}" for ms in row[key]) for key in ("decode_ms", "prefill_ms"))
        window.say(f"{name}, {way}: decode {decode} ms, prefill {prefill} ms, one prompt {row['prompt_ms']:.2f} ms")
    kernels = rows.get("kernels of a prompt", [])
    texts = [f"{kernel[:34]} x{count} {ms:.2f}" for kernel, count, ms in kernels]
    if texts:
        window.say(f"  {name}, ms of a prompt: {'; '.join(texts)}")


def log_lines(log: Path, wanted: str) -> list[str]:
    return [line[:330] for line in log.read_text(errors="replace").splitlines() if re.search(wanted, line)]


# --- servers ---------------------------------------------------------------------------------------------------------


class Servers:
    """Servers that start side by side."""

    def __init__(self, window: Window, stack: ExitStack) -> None:
        self.window, self.stack, self.pool = window, stack, ThreadPoolExecutor(8)

    def start(
        self,
        name: str,
        model: str | Path,
        *flags: str,
        limit_s: float = SERVER_LIMIT_S,
        command: Sequence[str] = OURS,
        **environment: str,
    ) -> Future[Server]:
        limit = self.window.left(limit_s)
        log = self.window.out / f"server_{name}.log"
        return self.pool.submit(
            lambda: self.stack.enter_context(served(Path(model), log, flags, limit, command, **environment))
        )


def answers_of(server: Server, each: int = 6) -> tuple[bench_tiny.Score, list[str]]:
    """The embedded model's score on so many problems of each task, and the texts of its answers."""
    items = bench_tiny.load(None, each, ())
    replies, _ = api.run(server.url, [bench_tiny.request(item) for item in items], 24, None)
    report = bench_tiny.Report()
    for item, reply in zip(items, replies, strict=True):
        report.add(item, reply)
    return report.whole(), [_text(json.dumps((reply.body or {}).get("choices"))) for reply in replies]


def same_answers(window: Window, servers: dict[str, Server]) -> None:
    answers: dict[str, list[str]] = {}
    for name, server in servers.items():
        score, answers[name] = answers_of(server)
        window.say(f"embedded model, {name}: {score.right} of {score.count} right, {score.errors} errors")
        if score.errors:
            window.fail(f"{name}: {score.errors} requests failed")
    one, two = answers.values()
    same = sum(a == b for a, b in zip(one, two, strict=True))
    window.say(f"embedded model: {same} of {len(one)} answers have the same text with one rank and with several")


def _text(choices: str) -> str:
    return "".join(re.findall(r'"(?:content|text|arguments)": "(?:[^"\\]|\\.)*"', choices))


def load(
    window: Window,
    server: Server,
    concurrency: int,
    prompts: int,
    lengths: tuple[int, int] = SERVER_LENGTHS,
    shortest: float = 0.0,
) -> dict[str, Any]:
    """`shortest`: request and answer, as a part of the longest."""
    result = window.out / f"load_{server.pid}_{concurrency}.jsonl"
    command = [sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang", "--base-url", server.url]
    command += ["--dataset-name", "random-ids", "--random-range-ratio", str(shortest), "--seed", str(concurrency)]
    command += ["--random-input-len", str(lengths[0]), "--random-output-len", str(lengths[1])]
    command += ["--num-prompts", str(prompts), "--max-concurrency", str(concurrency), "--flush-cache"]
    command += ["--output-file", str(result), "--disable-tqdm"]
    done = subprocess.run(
        command, env=checkout_env(), capture_output=True, text=True, timeout=window.left(LOAD_LIMIT_S), check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    row: dict[str, Any] = json.loads(result.read_text().splitlines()[-1])
    return row


def say_load(window: Window, name: str, server: Server) -> None:
    load(window, server, LOADS[0][0], LOADS[0][0])  # warms up
    for concurrency, prompts in LOADS:
        row = load(window, server, concurrency, prompts)
        numbers = ("output_throughput", "mean_ttft_ms", "mean_tpot_ms", "median_itl_ms", "p99_itl_ms")
        texts = [f"{key} {row[key]:.1f}" for key in numbers]
        window.say(f"served, {name}, {concurrency} at a time: {', '.join(texts)}, {row['completed']} completed")


def num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def descendants(pid: int) -> list[int]:
    """The oldest first."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *descendants(child)]
    return sorted(found, key=lambda each: int(_status(each)[19]))


def _status(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def kill_a_rank(window: Window, server: Server, log: Path, number: int = 1) -> tuple[float, bool]:
    """A process of the server, while it decodes, by its place: the ranks, then the detokenizer. How long the others
    lived on, and whether that went as it should."""
    body = {"text": "One, two,", "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True, "temperature": 0.0}}
    request = urllib.request.Request(
        f"{server.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )

    def post() -> None:
        with suppress(OSError):
            urllib.request.urlopen(request, timeout=60).read()

    threading.Thread(target=post, daemon=True).start()
    time.sleep(2)
    everyone = descendants(server.pid)
    ranks = [pid for pid in everyone if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    started = time.monotonic()
    os.kill(ranks[number], signal.SIGKILL)
    while any(_alive(pid) for pid in [server.pid, *everyone]) and time.monotonic() - started < 40:
        time.sleep(0.05)
    took = time.monotonic() - started
    left = [pid for pid in [server.pid, *everyone] if _alive(pid)]
    said = [line[-160:] for line in log.read_text(errors="replace").splitlines() if "process died" in line]
    window.say(f"a rank killed: all gone after {took:.1f} s, left {left}; {said[-1:]}")
    right = not left and bool(said) and "] Then the " not in said[-1]
    if not right:
        window.fail("kill -9 of a rank")
    return took, right


def _alive(pid: int) -> bool:
    with suppress(OSError):
        return _status(pid)[0] not in "ZX"
    return False


# --- the all-reduce alone --------------------------------------------------------------------------------------------


ALL_REDUCES, QUANTIZED_SUMS = "all_reduce_on_gpu", "quantized_sums_on_gpu"


def rounds(
    window: Window, count: int, ranks: int, limit: float, *flags: str, lines: int = 8, script: str = ALL_REDUCES
) -> None:
    command = [sys.executable, str(ROOT / "scripts" / f"{script}.py"), *(flags or ("--no-times",))]
    command += ["--rounds", str(count), "--ranks", str(ranks)]
    if (library := window.out / "site" / "sm120_sgl_kernel" / "libsm120_sgl_kernel.so").exists():
        command += ["--library", str(library)]
    log = window.out / f"{script}_{ranks}_{count}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status: int | str = process.wait(window.left(limit))
        except subprocess.TimeoutExpired:
            status = f"not done after {limit:.0f} s"
            os.killpg(process.pid, signal.SIGKILL)
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    for line in said[-lines:]:
        window.say(f"  {ranks} ranks: {line[:150]}")
    if status != 0:
        window.fail(f"{script} of {ranks} ranks: {status}")


# --- all of it -------------------------------------------------------------------------------------------------------


def first_wave(window: Window, args: argparse.Namespace) -> None:
    """Steps and right answers."""
    waiting = [StepTimes.start("experts_tp1", window, args.experts, "--tp", "1", "--profile", gpu=nth_gpu(1))]
    with window.part("sgl-kernel"):
        install_kernels(window)
    waiting.insert(0, StepTimes.start("experts_tp2", window, args.experts, "--tp", "2", "--profile"))
    waiting.append(StepTimes.start("experts_tp2_ep2", window, args.experts, "--tp", "2", "--ep-size", "2", "--profile"))
    if args.slice:
        waiting.append(StepTimes.start("slice_tp2", window, args.slice, "--tp", "2", "--profile"))
    with ExitStack() as stack:
        servers = Servers(window, stack)
        two = servers.start("tiny_tp2", EMBEDDED, "--tp", "2", *SMALL_SERVER)
        one = servers.start("tiny_tp1", EMBEDDED, *SMALL_SERVER, **first_gpu())
        ready, end = [], time.monotonic() + window.left(READY_LIMIT_S)
        for run in waiting:
            with window.part(run.name):
                run.wait_until_ready(end)
                ready.append(run)
                window.say(f"{run.name} is ready")
        for run in ready:
            with window.part(run.name):
                say_steps(window, run.name, run.measure())
        with window.part("answers"):
            pair = {"one rank": one.result(window.left(60)), "two ranks": two.result(window.left(60))}
            log = window.out / "server_tiny_tp2.log"
            for line in log_lines(log, r"all_reduce|through NCCL alone|canary|[Pp]robe"):
                window.say(f"  log: {line}")
            same_answers(window, pair)
            if "kill" not in args.skip:
                kill_a_rank(window, pair["two ranks"], log)


def second_wave(window: Window, args: argparse.Namespace) -> None:
    """Load, and random rounds while the servers start."""
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        servers = Servers(window, stack)
        started = {
            "two ranks": servers.start("tp2", args.experts, "--tp", "2", *SERVER),
            "one rank": servers.start("tp1", args.experts, *SERVER, CUDA_VISIBLE_DEVICES=nth_gpu(1)),
        }
        checked = pool.submit(rounds, window, args.rounds, 2, 120) if "rounds" not in args.skip else None
        for name, future in started.items():
            with window.part(f"load, {name}"):
                server = future.result(window.left(SERVER_LIMIT_S))
                window.say(f"served, {name}: up after {server.start_seconds:.0f} s")
        if checked is not None:
            with window.part("rounds"):
                checked.result()
        for name, future in started.items():
            with window.part(f"load, {name}"):
                say_load(window, name, future.result(1))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", required=True)
    parser.add_argument("--slice")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=450.0, help="seconds")
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--skip", default="", help="of steps, kill, load, rounds, ranks")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if why := requirements.complaint():
        print(why, flush=True)
        return 2
    window = Window(args.out.resolve(), args.limit)
    if "steps" in args.skip:
        with window.part("sgl-kernel"):
            install_kernels(window)
    else:
        first_wave(window, args)
    if "load" not in args.skip:
        second_wave(window, args)
    elif "rounds" not in args.skip:
        with window.part("rounds"):
            rounds(window, args.rounds, 2, 120)
    if "ranks" not in args.skip:
        for ranks in (4, 8):
            with window.part(f"{ranks} ranks"):
                rounds(window, 200, ranks, 45)
    print("\n".join(window.failures) or "nothing failed", flush=True)
    return 1 if window.failures else 0


if __name__ == "__main__":
    sys.exit(main())
