"""Processes that do one job after another for the front, where input of a client or checkpoint may take any time or
memory, or crash a library. A caller that waits too long for an answer kills the process and starts another one."""

from __future__ import annotations

import logging
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from sglang.srt.managers.reap import reap
from sglang.srt.utils.child_start import ignore_terminal, start_child
from sglang.srt.utils.process_limits import die_with_parent, name_process

logger = logging.getLogger(__name__)

POLL_S = 0.25
"""Seconds between two checks whether an answer is still wanted."""


class ProcessEnded(RuntimeError):
    """Raised when the process died, or was killed because its answer was late (`is_late`)."""

    def __init__(self, is_late: bool) -> None:
        super().__init__("it took too long" if is_late else "it died")
        self.is_late = is_late


JOB_NAME = "sglang-job"


class JobProcess:
    """One process and its pipe. Call `start` in the thread that uses it: the process ends with that thread."""

    def __init__(self, entry: Callable[..., None], args: tuple[Any, ...], name: str) -> None:
        """entry(*args, connection): the process's main function, which must begin with `begin_jobs`."""
        self._entry, self._args, self._name = entry, args, name
        self._lock = threading.Lock()
        """Held while a process starts or is killed: the server may end in the middle of a start."""
        self._has_ended = False
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    @property
    def pid(self) -> int | None:
        """Returns the id of the running process; None if there is none."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Starts the process, unless `forbid` was called. If the system cannot start it, the next job fails."""
        with self._lock:
            if not self._has_ended:
                self._start()

    def _start(self) -> None:
        self._process = self._pipe = None
        ours, theirs = multiprocessing.Pipe(duplex=True)
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=self._entry, args=(*self._args, theirs), name=self._name, daemon=True)
        try:
            start_child(process)
        except OSError as error:
            logger.error("A process (%s) cannot be started: %s", self._name, error)
            return
        finally:
            theirs.close()
        self._process, self._pipe = process, ours

    def kill(self) -> None:
        """Kills the process. May be repeated and called from another thread."""
        with self._lock:
            if self._process is not None:
                reap([self._process])
            self._close_pipe()

    def forbid(self) -> BaseProcess | None:
        """Starts no other process from now on. Returns the one that there is."""
        with self._lock:
            self._has_ended = True
            return self._process

    def close(self) -> None:
        """Closes the pipe to a process that has ended."""
        with self._lock:
            self._close_pipe()

    def _close_pipe(self) -> None:
        if self._pipe is not None:
            with suppress(OSError):
                self._pipe.close()

    def ask(self, message: bytes, should_stop: Callable[[float], bool]) -> bytes:
        """Returns the answer to a message. Raises ProcessEnded, after which there is no process."""
        if self._pipe is None:
            self._fail(False)
        try:
            self._pipe.send_bytes(message)
        except OSError:
            self._fail(False)
        return self.receive(should_stop)

    def receive(self, should_stop: Callable[[float], bool]) -> bytes:
        """Returns the next message. should_stop(seconds so far) returns whether to stop waiting. Raises
        ProcessEnded."""
        if self._pipe is None:
            self._fail(False)
        started = time.monotonic()
        try:
            while not self._pipe.poll(POLL_S):
                if should_stop(time.monotonic() - started):
                    self._fail(True)
            return self._pipe.recv_bytes()
        except (OSError, EOFError):
            self._fail(False)

    def _fail(self, is_late: bool) -> NoReturn:
        self.kill()
        raise ProcessEnded(is_late) from None


def end_all(jobs: Iterable[JobProcess]) -> None:
    """Kills processes for good, and waits for all of them together."""
    ended = list(jobs)
    reap([process for job in ended if (process := job.forbid()) is not None])
    for job in ended:
        job.close()


def begin_jobs() -> None:
    """Makes this process end with its parent and ignore an interrupt at the terminal. Call it first in a process's main
    function."""
    die_with_parent()
    name_process(JOB_NAME)
    ignore_terminal()
