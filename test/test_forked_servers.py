"""What forked servers inherit from the process that asks for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from live_server import PYTHON_ROOT

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
    ran = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=60)
    assert ran.stdout == "0\n", ran.stderr
