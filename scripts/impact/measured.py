"""python measured.py REPORT LIMIT_S COMMAND...: runs a command and writes what it took to REPORT, as JSON.

{"status": exit status, null if it was killed at its limit, "seconds": of processors, "wall_s": seconds}. Processes that
the command started and left count too: this one adopts them, as a process of its own that measures nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h
PATIENCE_S = 20.0
"""For the processes that the command left."""


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def reap() -> None:
    """Waits until no process is left, and kills those that stay."""
    end = time.monotonic() + PATIENCE_S
    with contextlib.suppress(ChildProcessError):
        while True:
            if os.waitpid(-1, os.WNOHANG) != (0, 0):
                continue
            if time.monotonic() > end:
                for pid in children():
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


def wait_for(pid: int, until: float) -> int | None:
    """Returns the exit status of a process, or None if it has not ended in time. Meanwhile orphans are waited for, as
    tests look at whether processes are gone."""
    while time.monotonic() < until:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == pid:
            return os.waitstatus_to_exitcode(status)
        if not ended:
            time.sleep(0.02)
    return None


def main(report: str, limit_s: str, *command: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    began = time.monotonic()
    process = subprocess.Popen(command, start_new_session=True)
    status = wait_for(process.pid, began + float(limit_s))
    if status is None:
        os.killpg(process.pid, signal.SIGKILL)
    wall_s = time.monotonic() - began
    reap()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    taken = {"status": status, "seconds": round(used.ru_utime + used.ru_stime, 1), "wall_s": round(wall_s, 1)}
    Path(report).write_text(json.dumps(taken))


if __name__ == "__main__":
    main(*sys.argv[1:])
