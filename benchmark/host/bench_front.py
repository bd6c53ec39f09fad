"""CPU time of the processes between the GPUs and a client: the API process, the detokenizers and our load generator.

    python benchmark/host/bench_front.py [--replicas 2] [--at-once 256] [--backend sglang-oai-chat] [--output-len 128]

The real server and the real load generator, with a scheduler in each replica that computes nothing: each request gets a
token every --step-ms (`paced_scheduler`). For each process it prints microseconds of CPU a token, and the tokens a
second at which it fills one core: beyond that it is what limits the server, however many GPUs are behind it. CPU
time is counted, user and system, not wall time, so the figures hold also where processes share few cores.

Lengths are uniform up to the longest, as in `bench_serving`; the default ones are those of `parallel/divided.py`.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import uvloop

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "test")]

from live_server import LiveServer  # noqa: E402
from paced_scheduler import NAME, STEP_MS  # noqa: E402

from sglang.bench.backends import BACKENDS, CallOptions  # noqa: E402
from sglang.bench.datasets import DatasetArgs, Prompt, make_prompts  # noqa: E402
from sglang.bench.http_client import Endpoint  # noqa: E402
from sglang.bench.load import run_load  # noqa: E402
from sglang.bench.tokenizer import load_prompt_tokenizer  # noqa: E402
from sglang.embedded import DEFAULT_MODEL_PATH  # noqa: E402

TICKS = os.sysconf("SC_CLK_TCK")
SERVE = "--serve"
"""First word of the call that is the server."""
GENERATOR, API, DETOKENIZER = "load generator", "API process", "detokenizer"


@dataclass(frozen=True)
class Load:
    """What the clients ask for."""

    backend: str
    at_once: int
    num_prompts: int
    lengths: tuple[int, int]

    def prompts(self) -> list[Prompt]:
        dataset = DatasetArgs(
            name="random-ids", num_prompts=self.num_prompts, random_input_len=self.lengths[0],
            random_output_len=self.lengths[1], as_ids=BACKENDS[self.backend].takes_ids,
        )  # fmt: skip
        return make_prompts(dataset, load_prompt_tokenizer(DEFAULT_MODEL_PATH))

    async def run(self, url: str, prompts: list[Prompt]) -> tuple[int, float]:
        """Returns the number of output tokens, and of events a token: below 1 where the server wrote several tokens
        into one, since it was late or they are parts of a character. Raises RuntimeError where a request failed."""
        backend, arrivals = BACKENDS[self.backend], [0.0] * len(prompts)
        results, _ = await run_load(
            backend, Endpoint.parse(url, {}), prompts, CallOptions("default"), arrivals, self.at_once, progress=False
        )
        if failed := [result.error for result in results if result.error]:
            raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
        num_tokens = sum(result.output_len for result in results)
        return num_tokens, sum(1 + len(result.itl) for result in results) / num_tokens


def serve(argv: list[str]) -> int:
    """`sglang serve` with the stand-in."""
    from sglang.launch_server import report_user_errors, serve
    from sglang.srt.managers import launch

    launch.SCHEDULER_ENTRY = "paced_scheduler:run_scheduler"
    return report_user_errors(lambda: serve(argv, "bench_front"))


def kind_of(pid: int) -> str | None:
    """Which process of the server a child is; None: none of them (multiprocessing's own)."""
    if Path(f"/proc/{pid}/comm").read_text().strip() == NAME:
        return None
    return DETOKENIZER if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes() else None


def names_by_pid(pid: int) -> dict[int, str]:
    """Process ids, the API process' first."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    kinds = {child: kind_of(child) for child in children}
    return {pid: API, **{child: kind for child, kind in kinds.items() if kind is not None}}


def cpu_seconds(pid: int | str) -> np.ndarray:
    """Time of all threads so far: of the program, and in the kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return np.array([int(fields[11]), int(fields[12])]) / TICKS


@dataclass(frozen=True)
class Used:
    """What the processes of one kind took for a load."""

    kind: str
    count: int
    seconds: np.ndarray
    """As `cpu_seconds`, of all of them."""
    num_tokens: int
    """Of all of them together."""

    def line(self) -> str:
        kernel, whole = self.seconds[1] / self.num_tokens, self.seconds.sum() / self.num_tokens
        times = f"{whole * 1e6:>6.1f} us, {kernel * 1e6:>4.1f} of them in the kernel"
        return f"{self.count} x {self.kind:<16}{times}{self.count / whole:>10,.0f} tok/s"


def measure(server: LiveServer, load: Load) -> tuple[list[Used], float]:
    """CPU time of each kind of process for the load, and events a token."""
    prompts = load.prompts()
    kinds: dict[int | str, str] = {"self": GENERATOR, **names_by_pid(server.process.pid)}
    before = {pid: cpu_seconds(pid) for pid in kinds}
    num_tokens, events = uvloop.run(load.run(server.url, prompts))
    used = {pid: cpu_seconds(pid) - before[pid] for pid in kinds}
    rows = []
    for kind in (GENERATOR, API, DETOKENIZER):
        seconds = [used[pid] for pid in kinds if kinds[pid] == kind]
        rows.append(Used(kind, len(seconds), np.sum(seconds, axis=0), num_tokens))
    return rows, events


def main() -> int:
    if sys.argv[1:2] == [SERVE]:
        return serve(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--at-once", type=int, default=256)
    parser.add_argument("--num-prompts", type=int, default=1024)
    parser.add_argument("--step-ms", type=float, default=60.0, help="between the tokens of a request")
    parser.add_argument("--stream-interval", type=int, default=1, help="the server's flag")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--backend", nargs="+", choices=("sglang", "sglang-oai", "sglang-oai-chat"), default=["sglang"])
    args = parser.parse_args()
    os.environ[STEP_MS] = str(args.step_ms)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    command = (str(HERE / "bench_front.py"), SERVE)
    flags = ("--dp-size", args.replicas, "--stream-interval", args.stream_interval, "--max-total-tokens", 8192)
    server = LiveServer(*map(str, flags), launch=command)
    try:
        server.wait_up()
        for backend in args.backend:
            load = Load(backend, args.at_once, args.num_prompts, (args.input_len, args.output_len))
            rows, events = measure(server, load)
            print(f"{backend}, {args.replicas} replicas, {args.at_once} at a time, outputs up to {args.output_len}")
            print(f"{rows[0].num_tokens:,} tokens, {events:.3f} events a token", flush=True)
            print("\n".join(row.line() for row in rows), flush=True)
    finally:
        server.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
