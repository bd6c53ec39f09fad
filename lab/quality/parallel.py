"""Processes side by side, each with a log, on the GPUs that there are."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

END_S = 10.0
"""Time for a process to end after it was asked to."""
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Task:
    """A command, and the file that gets what it prints."""

    name: str
    command: Sequence[str]
    log: Path


@dataclass(slots=True)
class _Running:
    task: Task
    process: subprocess.Popen[bytes]
    started: float


class Processes:
    """Runs tasks, at most `jobs` at once, evenly over the GPUs where `device` is "cuda". Within the `with` block
    SIGINT, SIGTERM or the `limit` of seconds end all of them, and no other one begins."""

    def __init__(self, jobs: int, device: str, limit: float) -> None:
        self.gpus = torch.cuda.device_count() if device == "cuda" else 0
        self.slots: list[_Running | None] = [None] * jobs
        self.end = time.monotonic() + limit
        self.stopped = ""

    def __enter__(self) -> Processes:
        self.before = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        running = [slot for slot in self.slots if slot is not None]
        for each in running:
            each.process.terminate()
        for each in running:
            try:
                each.process.wait(END_S)
            except subprocess.TimeoutExpired:
                each.process.kill()
                each.process.wait()
            print(f"{each.task.name}: not finished ({self.stopped})", flush=True)

    def _stop(self, number: int, _: FrameType | None) -> None:
        self.stopped = signal.Signals(number).name

    def run(self, tasks: Sequence[Task]) -> None:
        """Runs the tasks in their order, and prints how each ended. Returns once all have ended, or the block ends."""
        waiting = list(tasks)
        while not self.stopped and (waiting or any(self.slots)):
            if time.monotonic() > self.end:
                self.stopped = "the limit of time"
                break
            for number, slot in enumerate(self.slots):
                if slot is not None and slot.process.poll() is not None:
                    self._report(slot)
                    self.slots[number] = slot = None
                if slot is None and waiting:
                    self.slots[number] = self._start(waiting.pop(0), number)
            time.sleep(POLL_S)
        if waiting:
            print(f"not begun ({self.stopped}): {', '.join(task.name for task in waiting)}", flush=True)

    def _start(self, task: Task, number: int) -> _Running:
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(number % self.gpus)} if self.gpus else None
        with task.log.open("ab") as log:
            process = subprocess.Popen(task.command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        return _Running(task, process, time.monotonic())

    def _report(self, ended: _Running) -> None:
        seconds, status = time.monotonic() - ended.started, ended.process.returncode
        print(
            f"{ended.task.name}: {seconds:.0f} s" + (f", status {status}: {ended.task.log}" if status else ""),
            flush=True,
        )
