"""A server that is told to end, or whose engine has died, ends with a status, whatever hangs in it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest
from live_server import PATIENCE_S, LiveServer

LAUNCH = str(Path(__file__).with_name("hanging_launch.py"))


@contextmanager
def hanging(where: str, end_s: float = 4.5) -> Iterator[LiveServer]:
    """end_s: what a server has to end, before that is done by force."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HANGS_IN", where)
        environment.setenv("SGLANG_DRAIN_TIMEOUT", "1")
        environment.setenv("SGLANG_END_TIMEOUT", str(end_s))
        server = LiveServer(launch=(LAUNCH,))
    try:
        yield server
    finally:
        left = psutil.Process(server.process.pid).children(recursive=True) if server.process.poll() is None else []
        server.end()
        for process in left:
            if process.is_running():
                process.kill()


def wait_for_hang(server: LiveServer) -> None:
    while not server.log_path.exists() or "it hangs here" not in server.log():
        assert server.process.poll() is None
        time.sleep(0.02)


def ask_for_what_hangs(server: LiveServer) -> None:
    """The answer never comes."""
    threading.Thread(target=_abort, args=(server.url,), daemon=True).start()
    wait_for_hang(server)


def _abort(url: str) -> None:
    try:
        httpx.post(f"{url}/abort_request", json={"rid": "x"}, timeout=300)
    except httpx.TransportError:
        pass  # the server has ended


@pytest.mark.parametrize("where", ["start", "start-interpreter", "start-loop"])
def test_a_start_that_hangs(where: str) -> None:
    with hanging(where) as server:
        wait_for_hang(server)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() in (0, 1)


@pytest.mark.parametrize("where", ["shutdown", "drain", "close", "executor", "thread"])
def test_an_end_that_hangs(where: str) -> None:
    with hanging(where) as server:
        server.wait_up()
        children = psutil.Process(server.process.pid).children(recursive=True)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 1
        assert "most recent call first" in server.log()  # where it hung
        assert not psutil.wait_procs(children, PATIENCE_S)[1]


def test_an_event_loop_that_hangs() -> None:
    with hanging("loop") as server:
        server.wait_up()
        ask_for_what_hangs(server)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 1


def test_an_event_loop_that_hangs_while_the_engine_dies() -> None:
    with hanging("loop") as server:
        server.wait_up()
        ranks = psutil.Process(server.process.pid).children(recursive=True)
        ask_for_what_hangs(server)
        os.kill(max(ranks, key=lambda process: process.memory_info().rss).pid, signal.SIGKILL)
        assert server.wait_exit() == 1


def test_a_rank_that_outlives_its_kill() -> None:
    with hanging("rank", 10.0) as server:
        server.wait_up()
        children = psutil.Process(server.process.pid).children(recursive=True)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 1
        assert any(process.is_running() for process in children)
        for process in children:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        assert "does not end although it was killed" in server.log()
