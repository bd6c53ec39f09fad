"""Starts, watches and ends the processes of one engine on this machine.

A child sends signs of life from its start on, because one that is stopped, or never releases the interpreter, cannot
report it. When a rank ends, ranks that wait for it fail too: their messages are collected for a moment, so that the
first cause is named, and those still alive print their stacks. Then all are ended.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from sglang.srt.errors import UserError
from sglang.srt.managers.child import ALIVE, ERROR, READY, STOP, USER_ERROR, child_main
from sglang.srt.managers.reap import reap
from sglang.srt.managers.watchdog import heartbeat_seconds
from sglang.srt.managers.wire.ipc import Ports
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.child_start import start_child

logger = logging.getLogger(__name__)

_EXIT_GRACE_S = 1.0
"""Seconds for the last words of a dying child, and of the ranks that wait for it, to arrive."""
_STACKS_S = 0.3
"""Seconds for the other ranks to print their stacks."""
_MISSED_BEATS = 2.5
"""Missed signs of life after which a child counts as silent, once another rank has failed."""
_LOST_CONNECTION = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "ncclRemoteError")
"""Messages of collectives on a rank after another one has ended."""
START_SILENCE_S = 60.0
"""Least silence in seconds that is allowed during start-up: loading a library from a slow disk may block the
interpreter."""


class EngineError(RuntimeError):
    """Raised when a process of the engine failed. `details` is its traceback, empty if it left none."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details

    @property
    def lost_connection(self) -> bool:
        """Returns whether the process failed only because another rank had ended."""
        last = self.details.splitlines()[-1:]
        return any(sign in line for line in last for sign in _LOST_CONNECTION)


@dataclass(slots=True)
class _Child:
    name: str
    process: BaseProcess
    pipe: Connection
    ready: bool = False
    last_heard: float = field(default_factory=time.monotonic)

    def silent_for(self, seconds: float) -> bool:
        """Returns whether the child has given no sign of life for this many seconds."""
        limit_s = seconds if self.ready else max(seconds, START_SILENCE_S)
        return time.monotonic() - self.last_heard > limit_s


class EngineProcesses:
    """Child processes that fail together: the ranks of a replica, and its detokenizer."""

    def __init__(self, limit_s: float, on_change: Callable[[], None]) -> None:
        """limit_s: silence after which a child counts as stuck. `on_change()` is called from another thread when all
        children are ready, and when one has failed without having been told to end."""
        self.failure: UserError | EngineError | None = None
        """Why the processes have ended."""
        self.ready = False
        self._limit_s = limit_s
        self._on_change = on_change
        self._children: list[_Child] = []
        self._closing = self._ended = False
        self._end_lock = threading.Lock()

    @property
    def process_ids(self) -> dict[str, int | None]:
        return {child.name: child.process.pid for child in self._children}

    def spawn(self, name: str, entry: str, call: tuple[ServerArgs, Ports, int]) -> None:
        """Starts a child; `child.child_main` describes `entry` and `call`."""
        ours, theirs = multiprocessing.Pipe(duplex=True)
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=child_main, args=(name, entry, call, theirs), name=name, daemon=True)
        start_child(process)
        theirs.close()
        self._children.append(_Child(name, process, ours))

    def watch(self) -> None:
        """Begins to watch the children; call it once, after all are started."""
        threading.Thread(target=self._watch_children, name="engine-monitor", daemon=True).start()

    def tell_end(self, limit_s: float) -> None:
        """Tells all processes to end, without waiting. May be repeated."""
        with self._end_lock:
            self._tell_end()

    def _tell_end(self) -> None:
        if self._closing:
            return
        self._closing = True
        for child in self._children:
            # A message, because closing would not break the pipe while the monitor thread waits on it.
            with contextlib.suppress(OSError):  # already gone
                child.pipe.send_bytes(STOP)

    def end(self, limit_s: float) -> None:
        """Ends all processes; kills those that are not gone after `limit_s` seconds. May be repeated."""
        with self._end_lock:
            if self._ended:
                return
            self._ended = True
            self._tell_end()
            end = time.monotonic() + limit_s
            for child in self._children:
                child.process.join(max(0.0, end - time.monotonic()))
            reap(child.process for child in self._children if child.process.is_alive())
            for child in self._children:
                child.pipe.close()

    # --- the monitor's thread -----------------------------------------------------------------------------------------

    def _watch_children(self) -> None:
        """Watches until the first failure, or until the processes are ended."""
        by_pipe = {child.pipe: child for child in self._children}
        while not self._closing:
            try:
                failures = self._listen(by_pipe, heartbeat_seconds(self._limit_s))
                silent = [child for child in self._children if child.silent_for(self._limit_s)]
                causes = self._causes(by_pipe, failures) if failures or silent else []
                if self._closing:  # they ended because they were told to
                    return
                if causes:
                    self._fail(causes, by_pipe.values())
                    return
            except (OSError, ValueError):  # the pipes were closed by `end`
                return
            if not self.ready and all(child.ready for child in self._children):
                self.ready = True  # and watch on
                self._on_change()

    def _listen(self, by_pipe: dict[Connection, _Child], timeout_s: float) -> list[UserError | EngineError]:
        """Waits for messages and returns the failures that have arrived."""
        failures: list[UserError | EngineError] = []
        for pipe in multiprocessing.connection.wait(list(by_pipe), timeout_s):
            failure = self._read(by_pipe[pipe])  # type: ignore[index]
            if failure is not None:
                del by_pipe[pipe]  # type: ignore[arg-type]
                failures.append(failure)
        return failures

    def _causes(
        self, by_pipe: dict[Connection, _Child], failures: list[UserError | EngineError]
    ) -> list[UserError | EngineError]:
        """Returns the failures and silent children, the likely first cause first: the others may only have waited for
        it. Empty if a silent child speaks again. `by_pipe`: children that have not failed; waits up to _EXIT_GRACE_S
        for more of them to fail."""
        end = time.monotonic() + _EXIT_GRACE_S
        while not self._closing and len(by_pipe) > 1 and (left := end - time.monotonic()) > 0:
            failures += self._listen(by_pipe, left)  # the last child is the detokenizer, which waits for no rank
        failures.sort(key=lateness)
        limit_s = _MISSED_BEATS * heartbeat_seconds(self._limit_s)
        silent = [child for child in by_pipe.values() if child.silent_for(limit_s)]
        return [
            *(
                EngineError(f"the {child.name} process does not answer (--watchdog-timeout {self._limit_s:g})")
                for child in silent
            ),
            *failures,
        ]

    def _print_stacks(self, children: Iterable[_Child]) -> None:
        """Makes the ranks that are still alive print their stacks to stderr."""
        ranks = [child for child in children if child.name.startswith("scheduler ")]
        for child in ranks:
            logger.error("Where %s is:", child.name)
            with contextlib.suppress(OSError):
                os.kill(child.process.pid or 0, signal.SIGUSR1)
            time.sleep(_STACKS_S)

    def _read(self, child: _Child) -> UserError | EngineError | None:
        child.last_heard = time.monotonic()
        try:
            message = child.pipe.recv_bytes()
        except (EOFError, ConnectionError):
            child.process.join(_EXIT_GRACE_S)
            return EngineError(f"the {child.name} process died ({_exit_reason(child.process.exitcode)})")
        if message == ALIVE:
            return None
        if message == READY:
            child.ready = True
            return None
        if message.startswith(USER_ERROR):
            return UserError(message.removeprefix(USER_ERROR).decode())
        details = message.removeprefix(ERROR).decode(errors="replace").rstrip()
        return EngineError(f"the {child.name} process failed: {details.splitlines()[-1]}", details)

    def _fail(self, causes: list[UserError | EngineError], others: Iterable[_Child]) -> None:
        """Logs the first cause and ends everything. `others` have not failed; their stacks show whether they wait for
        one that has."""
        failure = causes[0]
        if isinstance(failure, EngineError):
            logger.error("%s", f"{failure}\n{failure.details}".rstrip())
            for later in causes[1:]:
                _log_consequence(later)
            if self.ready:
                self._print_stacks(others)
        self.failure = failure
        self._on_change()
        self.end(0.0)


def lateness(failure: UserError | EngineError) -> int:
    """Returns a sort key of ranks' failures that does not depend on when they were reported: a rank that died silently
    is likely the cause, one that lost its connection to another rank is not."""
    if isinstance(failure, UserError):
        return 1
    return 2 if failure.lost_connection else int(bool(failure.details))


def _log_consequence(failure: UserError | EngineError) -> None:
    if isinstance(failure, UserError):
        return
    if failure.lost_connection:
        logger.error("Then %s process lost its connection to another rank", str(failure).partition(" process ")[0])
        logger.debug("%s", failure.details)
    else:
        logger.error("Then %s", f"{failure}\n{failure.details}".rstrip())


def _exit_reason(code: int | None) -> str:
    if code is None:
        return "it does not answer"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit status {code}"
