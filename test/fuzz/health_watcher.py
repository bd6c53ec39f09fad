"""`python health_watcher.py PORT PID`: asks the server on PORT for its health all the time; PID is its front process.

Runs apart from the test, whose own work would otherwise look like silence of the server. Answers every line of standard
input with a `Watch` since the line before, as JSON, and ends with standard input. A request that gets no answer for a
second is a silence; then the stacks of the server's threads go to its log (SIGUSR1, see observed_launch.py), so that it
can be seen what it does. Of a silence, the time that nobody could have used for an answer is counted apart: what the
front's threads and this process stood in line for a processor (Linux counts it for each thread), and what a hypervisor
gave to other machines.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

SILENCE_S = 1.0
GIVE_UP_S = 300.0
PAUSE_S = 0.05
REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@dataclass
class Silence:
    seconds: float
    """By the clock, which also counts when other programs had the processors."""
    cpu_seconds: float
    """What the front process itself computed meanwhile, in all its threads."""
    waited_seconds: float
    """Of `seconds`: without a processor, although one of them could have computed."""
    answer: str

    @property
    def seconds_with_a_processor(self) -> float:
        """What the server itself has to answer for: it computed, or slept."""
        return max(0.0, self.seconds - self.waited_seconds)

    def __str__(self) -> str:
        return (
            f"/health was silent for {self.seconds:.1f} s, {self.waited_seconds:.1f} s of them without a processor; "
            f"the front computed {self.cpu_seconds:.1f} s"
        )


@dataclass
class Watch:
    num_requests: int = 0
    longest_s: float = 0.0
    silences: list[Silence] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    """Status lines other than 200 and errors of the connection."""


def cpu_seconds(front: psutil.Process) -> float:
    with contextlib.suppress(psutil.NoSuchProcess):
        times = front.cpu_times()
        return float(times.user + times.system)
    return 0.0


def waited_seconds(pid: int) -> float:
    """How long the threads of a process, this process and the whole (virtual) machine have waited for processors."""
    nanoseconds = 0
    for statistics in (Path("/proc/self/schedstat"), *Path(f"/proc/{pid}/task").glob("*/schedstat")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            nanoseconds += int(statistics.read_text().split()[1])
    stolen = getattr(psutil.cpu_times(), "steal", 0.0) / (psutil.cpu_count() or 1)
    return nanoseconds / 1e9 + float(stolen)


def ask(port: int, pid: int) -> str:
    """The status line of the answer. Empty if there was none within GIVE_UP_S."""
    with socket.create_connection(("127.0.0.1", port), timeout=GIVE_UP_S) as connection:
        connection.sendall(REQUEST)
        if not select.select([connection], [], [], SILENCE_S)[0]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
            if not select.select([connection], [], [], GIVE_UP_S)[0]:
                return ""
        return connection.recv(4096).partition(b"\r\n")[0].decode()


def ask_once(port: int, front: psutil.Process, result: Watch) -> None:
    computed, waited, started = cpu_seconds(front), waited_seconds(front.pid), time.monotonic()
    try:
        answer = ask(port, front.pid)
    except OSError as error:
        answer = str(error)
    seconds = time.monotonic() - started
    result.num_requests += 1
    result.longest_s = max(result.longest_s, seconds)
    if seconds > SILENCE_S:
        waited = min(seconds, max(0.0, waited_seconds(front.pid) - waited))
        result.silences.append(Silence(seconds, cpu_seconds(front) - computed, waited, answer))
    if " 200 " not in answer:
        result.refusals.append(answer)


def watch(port: int, pid: int) -> None:
    front, result = psutil.Process(pid), Watch()
    while True:
        if select.select([sys.stdin], [], [], PAUSE_S)[0]:
            if not sys.stdin.readline():
                return
            ask_once(port, front, result)
            print(json.dumps(asdict(result)), flush=True)
            result = Watch()
        ask_once(port, front, result)


if __name__ == "__main__":
    watch(int(sys.argv[1]), int(sys.argv[2]))
