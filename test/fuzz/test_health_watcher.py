"""What counts as silence: a server that sleeps, not a machine whose processors others use."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
from fuzz.health_watcher import SILENCE_S, Watch, ask_once

SERVER = """
import socket, sys, time
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
while True:
    connection, _ = listener.accept()
    connection.recv(4096)
    {before_the_answer}
    connection.sendall(b"HTTP/1.1 200 OK\\r\\n\\r\\n")
    connection.close()
"""
SLEEPS = f"time.sleep({2.0 * SILENCE_S})"
COMPUTES_A_LITTLE = f"""end = time.thread_time() + {0.2 * SILENCE_S}
    while time.thread_time() < end: pass"""
RIVALS = 8
"""Processes that want the same processor."""
MIN_SHARE = 0.5


@contextmanager
def asked(before_the_answer: str) -> Iterator[tuple[int, psutil.Process]]:
    code = "import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN)" + SERVER.format(
        before_the_answer=before_the_answer
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline()), psutil.Process(process.pid)
        finally:
            process.kill()


def test_a_server_that_sleeps_is_silent() -> None:
    result = Watch()
    with asked(SLEEPS) as (port, front):
        ask_once(port, front, result)
    (silence,) = result.silences
    assert silence.seconds_with_a_processor > SILENCE_S and silence.cpu_seconds < MIN_SHARE * SILENCE_S
    assert result.refusals == []


def test_a_server_that_waits_for_a_processor_is_not() -> None:
    result = Watch()
    processor = {min(os.sched_getaffinity(0))}
    with asked(COMPUTES_A_LITTLE) as (port, front):
        front.cpu_affinity(list(processor))
        rivals = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(RIVALS)]
        try:
            for rival in rivals:
                os.sched_setaffinity(rival.pid, processor)
            ask_once(port, front, result)
        finally:
            for rival in rivals:
                rival.kill()
                rival.wait()
    (silence,) = result.silences
    assert silence.seconds_with_a_processor < MIN_SHARE * silence.seconds
    assert silence.waited_seconds > silence.cpu_seconds
