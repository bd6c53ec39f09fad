"""Duties of every child process of an engine besides its work: report its state, and exit when the parent is gone.

A child holds one end of a pipe (`ChildPipe`). It sends READY through it, or why it failed, and periodically ALIVE.
SIGUSR1 makes it print the stacks of all threads, even if it is stuck.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import signal
import threading
import time
import traceback
from multiprocessing.connection import Connection

from sglang.srt.errors import UserError
from sglang.srt.managers.watchdog import heartbeat_seconds
from sglang.srt.managers.wire.ipc import Ports
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.child_start import ignore_terminal
from sglang.srt.utils.log import configure_logging

READY = b"ready"
ALIVE = b"alive"
STOP = b"stop"
ERROR = b"error:"
USER_ERROR = b"user-error:"


class ChildPipe:
    """A child's end of the pipe, to which several threads write."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._lock = pipe, threading.Lock()

    def send_bytes(self, message: bytes) -> None:
        """Sends a message to the parent; threads may call it at the same time."""
        with self._lock:
            self._pipe.send_bytes(message)

    def recv_bytes(self) -> bytes:
        """Waits for a message of the parent and returns it. Raises EOFError if the parent has ended."""
        return self._pipe.recv_bytes()


def child_main(name: str, entry: str, call: tuple[ServerArgs, Ports, int], connection: Connection) -> None:
    """Runs `entry(*call, pipe)` in a child process, and reports readiness, signs of life and failures through
    `connection`."""
    ignore_terminal()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    args, pipe = call[0], ChildPipe(connection)
    threading.Thread(target=_exit_with_parent, args=(pipe, call[1]), name="parent-watch", daemon=True).start()
    threading.Thread(target=_report_alive, args=(pipe, args), name="signs-of-life", daemon=True).start()
    configure_logging(args.log_level, name.removeprefix("scheduler ") if " " in name else "")
    try:
        module, function = entry.split(":")
        getattr(importlib.import_module(module), function)(*call, pipe)
    except UserError as error:
        _report_and_exit(pipe, USER_ERROR + str(error).encode(), 2)
    except BaseException:
        _report_and_exit(pipe, ERROR + traceback.format_exc().encode(), 1)


def _report_alive(pipe: ChildPipe, args: ServerArgs) -> None:
    with contextlib.suppress(OSError):  # the parent is gone
        while True:
            time.sleep(heartbeat_seconds(args.watchdog_timeout))
            pipe.send_bytes(ALIVE)


def _report_and_exit(pipe: ChildPipe, message: bytes, status: int) -> None:
    """Reports and exits at once: threads and libraries of a broken process may never end by themselves."""
    try:
        pipe.send_bytes(message)
    except OSError:
        pass  # the parent is gone
    finally:
        os._exit(status)


def _exit_with_parent(pipe: ChildPipe, ports: Ports) -> None:
    """Ends the process when the parent asks for it or has died."""
    try:
        pipe.recv_bytes()
    except (EOFError, OSError):
        ports.remove()  # the dead parent could not remove them
    finally:
        os._exit(0)
