"""What forked servers inherit from the process that asks for them, and how their children end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from forked_servers import ForkedServer
from live_server import PYTHON_ROOT

from sglang.srt.utils.process_limits import die_with_parent

FORK_SERVER_STARTED_BY_A_CHILD = """
import multiprocessing
from forked_servers import forked_children
from sglang.srt.utils.child_start import start_child
from test_forked_servers import exit_with_blocked_signals

multiprocessing.set_forkserver_preload([])
with forked_children():
    child = multiprocessing.get_context("spawn").Process(target=int)
    start_child(child)
    child.join()
server = multiprocessing.get_context("forkserver").Process(target=exit_with_blocked_signals)
server.start()
server.join()
print(server.exitcode)
"""


def exit_with_blocked_signals() -> None:
    """The status is their number."""
    sys.exit(len(signal.pthread_sigmask(signal.SIG_BLOCK, ())))


def test_signals_reach_servers_where_an_engine_forked_first() -> None:
    """Children start with signals blocked. A fork server that started so would hand that to every later server, which
    tests then kill after 20 seconds."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([PYTHON_ROOT, str(Path(__file__).parent)])}
    script = [sys.executable, "-c", FORK_SERVER_STARTED_BY_A_CHILD]
    ran = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.stdout == "0\n", ran.stderr


SERVER_WITH_A_CHILD_THAT_COMPUTES = """
import multiprocessing
from test_forked_servers import compute_without_end

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=compute_without_end)
    child.start()
    child.join()
"""


def compute_without_end() -> None:
    """As a process does that renders a hostile template. Prints its id first."""
    die_with_parent()
    print(os.getpid(), flush=True)
    while True:
        pass


def test_children_of_a_killed_server_end(tmp_path: Path) -> None:
    launch, log = tmp_path / "launch.py", tmp_path / "log"
    launch.write_text(SERVER_WITH_A_CHILD_THAT_COMPUTES)
    server = ForkedServer([str(launch)], [], log, {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    wait_until(lambda: log.exists() and log.read_text().endswith("\n"))
    child = psutil.Process(int(log.read_text()))
    assert child.is_running()
    server.kill()
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def wait_until(condition: Callable[[], bool], limit_s: float = 300.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
