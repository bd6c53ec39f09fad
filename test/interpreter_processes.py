"""Processes with Triton's interpreter, forked from one that has imported what all need: importing it takes seconds.

That one is started when a test first needs it. It ends with the process that started it, and what it forked ends with
it, however they end: the kernel sees to that, since a process that waits for a child reads no end of its input.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
SERVE = f"import sys; sys.path.insert(0, {str(HERE)!r}); import interpreter_processes; interpreter_processes.serve()"
INTERPRETED = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def run_pytest(arguments: Sequence[str]) -> tuple[int, str]:
    """pytest in a process of its own, with this process's environment and folder, in the repaired interpreter.
    Returns its exit status, negative for a signal, and what it wrote."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        call = {
            "arguments": list(arguments),
            "environment": {**os.environ, **INTERPRETED},
            "folder": os.getcwd(),
            "output": output.name,
        }
        try:
            server.stdin.write(json.dumps(call) + "\n")
            server.stdin.flush()
            answer = server.stdout.readline()
        except BaseException:  # a time limit, say: the next file gets another process, which owes no answer
            _end(server)
            raise
        if not answer:
            _end(server)
            raise AssertionError(f"the process that others are forked from ended with status {server.returncode}")
        return int(answer), output.read()


@functools.cache
def _server() -> subprocess.Popen[str]:
    environment, pipe = {**os.environ, **INTERPRETED}, subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", SERVE], env=environment, stdin=pipe, stdout=pipe, text=True)


def _end(server: subprocess.Popen[str]) -> None:
    _server.cache_clear()
    server.kill()
    server.communicate()


def serve() -> None:
    """Forks a process for each line of the standard input, one after the other, and answers with its exit status."""
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches the process that waits too, which reports it
    import interpreter  # noqa: F401 (with torch and Triton, which it repairs)
    import pytest  # noqa: F401

    for line in sys.stdin:
        assert len(os.listdir("/proc/self/task")) == 1, "a fork has only one of several threads, and all of their locks"
        child = os.fork()
        if child == 0:
            _run(**json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run(arguments: list[str], environment: dict[str, str], folder: str, output: str) -> None:
    """Does not return."""
    import pytest

    status: int = pytest.ExitCode.INTERNAL_ERROR
    try:
        _end_with_parent()
        os.environ.clear()  # it is that of the first test which started the server
        os.environ.update(environment)
        os.chdir(folder)
        with open(os.devnull) as nothing, open(output, "w") as to:
            os.dup2(nothing.fileno(), 0)
            os.dup2(to.fileno(), 1)
            os.dup2(to.fileno(), 2)
        status = pytest.main(arguments)
        atexit._run_exitfuncs()
    except BaseException:
        status = status or pytest.ExitCode.INTERNAL_ERROR
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _end_with_parent() -> None:
    """Linux kills this process when the thread that started it ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "prctl")
