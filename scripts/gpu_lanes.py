#!/usr/bin/env python3
"""Runs commands side by side on the GPUs of one machine: each lane has GPUs and ports of its own.

    python scripts/gpu_lanes.py --out DIR [--limit 560] FILE

FILE has a lane in each line: its name, how many GPUs it takes and its command, between bars:

    images | 1 | python lab/media/bench_all.py --logs $LOGS
    halves | 2 | python lab/parallel/two_batch_overlap.py

A command is one of the shell. It sees its GPUs alone (CUDA_VISIBLE_DEVICES), its folder for logs (LOGS, in DIR) and its
first port (BENCHMARK_PORT); all share the caches of compiled kernels. A lane for which no GPU is left waits for one to
end. All of them end at --limit seconds. Prints the status and the last lines of each; everything is in DIR/NAME.log.
Exits with 1 if a lane failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

FIRST_PORT, PORTS_EACH = 32000, 100
TAIL_LINES = 40


@dataclass(frozen=True, slots=True)
class Lane:
    name: str
    gpus: int
    command: str


def read_lanes(text: str) -> list[Lane]:
    """Raises ValueError for a line that is not `name | GPUs | command`."""
    lanes = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        try:
            name, gpus, command = (part.strip() for part in line.split("|", 2))
            lanes.append(Lane(name, int(gpus), command))
        except ValueError:
            raise ValueError(f"not `name | GPUs | command`: {line!r}") from None
    return lanes


class Machine:
    """The GPUs of a machine that no lane has."""

    def __init__(self, gpus: list[str]) -> None:
        self.free, self.changed = gpus, threading.Condition()

    def take(self, count: int) -> list[str]:
        """Waits until so many are free."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.free) >= count)
            taken, self.free = self.free[:count], self.free[count:]
        return taken

    def give_back(self, gpus: list[str]) -> None:
        with self.changed:
            self.free = sorted(self.free + gpus)
            self.changed.notify_all()


def visible_gpus() -> list[str]:
    if seen := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return seen.split(",")
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    return [str(number) for number, line in enumerate(done.stdout.splitlines()) if line.startswith("GPU ")]


def run(lane: Lane, number: int, gpus: list[str], out: Path, end: float) -> str:
    """Returns how it ended: "0", another status, or that its time was over."""
    logs = out / lane.name
    logs.mkdir(parents=True, exist_ok=True)
    own = {
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        "LOGS": str(logs),
        "BENCHMARK_PORT": str(FIRST_PORT + PORTS_EACH * number),
    }
    with (out / f"{lane.name}.log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", lane.command], env=os.environ | own, stdout=log, stderr=log, start_new_session=True
        )
        try:
            return str(process.wait(max(0.0, end - time.monotonic())))
        except subprocess.TimeoutExpired:
            return "its time was over"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_all(lanes: list[Lane], gpus: list[str], out: Path, limit_s: float) -> dict[str, str]:
    """How each lane ended, by name. Lanes start in their order."""
    machine, began = Machine(gpus), time.monotonic()
    ended: dict[str, str] = {}

    def finish(number: int, lane: Lane, taken: list[str]) -> None:
        started = time.monotonic()
        try:
            over = started > began + limit_s
            ended[lane.name] = "no time was left" if over else run(lane, number, taken, out, began + limit_s)
        finally:
            machine.give_back(taken)
            print(f"{lane.name}: {ended.get(lane.name)} after {time.monotonic() - started:.0f} s", flush=True)

    with ThreadPoolExecutor(len(gpus) or 1) as pool:
        waiting = [pool.submit(finish, n, lane, machine.take(lane.gpus)) for n, lane in enumerate(lanes)]
    for future in waiting:
        future.result()
    return ended


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=560.0, help="seconds")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    lanes, gpus = read_lanes(args.file.read_text()), visible_gpus()
    if too_many := [lane.name for lane in lanes if lane.gpus > len(gpus)]:
        print(f"more GPUs than the {len(gpus)} of this machine: {', '.join(too_many)}", file=sys.stderr)
        return 2
    ended = run_all(lanes, gpus, args.out.resolve(), args.limit)
    for lane in lanes:
        log = args.out / f"{lane.name}.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        print(f"\n== {lane.name}: {ended[lane.name]}", *lines[-TAIL_LINES:], sep="\n", flush=True)
    return int(any(status != "0" for status in ended.values()))


if __name__ == "__main__":
    sys.exit(main())
