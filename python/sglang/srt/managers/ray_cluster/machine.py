"""Actor on a Ray node that starts the ranks of one machine of a replica, and reports their state.

The ranks are its children, as they are a server's elsewhere: when it ends, for whatever reason, they end too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from sglang.srt.errors import UserError
from sglang.srt.managers.engine_processes import EngineError, EngineProcesses
from sglang.srt.managers.replica_processes import start_processes
from sglang.srt.managers.wire.ipc import Keys, Ports, free_ports
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.log import configure_logging
from sglang.version import __version__

logger = logging.getLogger(__name__)

REMOVE_BEHIND_US = 'exec 3<&0; (cat <&3 >/dev/null; rm -rf -- "$@") >/dev/null 2>&1 &'
"""Shell command that removes the directories when its stdin ends."""
NUM_PORTS = 3
"""Ports of a machine: the rendezvous of the ranks, and the two channels from and to the front."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the processes of a machine have ended, as plain values. is_user_error: the user can correct the cause."""

    message: str
    details: str = ""
    is_user_error: bool = False

    def error(self) -> UserError | EngineError:
        """Returns the exception for this failure."""
        return UserError(self.message) if self.is_user_error else EngineError(self.message, self.details)


class Machine:
    """The actor. Its methods run concurrently in threads; they take and return plain values."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._processes: EngineProcesses | None = None
        self._ports: Ports | None = None
        self._ended = False
        self._alive: int | None = None
        """A pipe that ends with this process."""

    def facts(self, address: str) -> tuple[str, list[int]]:
        """Returns the release of this package, and unused ports of the node's address."""
        return __version__, free_ports(address, NUM_PORTS)

    def start(self, args: ServerArgs, ports: Ports, keys: Keys, name: str, environment: Mapping[str, str]) -> None:
        """Starts the ranks of this machine. ports: the front's; environment: the front's variables to set here too."""
        os.environ.update(environment)
        configure_logging(args.log_level)
        with self._changed:
            if self._ended:
                return
            self._ports = ports.on_other_machine(keys)
            self._alive = _remove_with_us(self._ports)
            with _without_main_module():
                self._processes = start_processes(args, self._ports, name, self._notify)
            self._processes.watch()

    def ready_or_failed(self) -> Failure | None:
        """Waits until all ranks are ready, and returns None, or why they failed."""
        return self._wait_for(lambda processes: processes.ready or processes.failure is not None)

    def failed(self) -> Failure | None:
        """Waits until the ranks have ended, and returns why; None: they were told to."""
        return self._wait_for(lambda processes: processes.failure is not None)

    def end(self, limit_s: float) -> None:
        """Ends the ranks, as EngineProcesses does."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if self._processes is not None:
            self._processes.end(limit_s)
        if self._ports is not None:
            self._ports.remove()

    def _wait_for(self, is_done: Callable[[EngineProcesses], bool]) -> Failure | None:
        """Waits until `is_done` or everything has ended. Returns the failure, if any."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or (self._processes is not None and is_done(self._processes)))
        failure = None if self._processes is None else self._processes.failure
        if failure is None:
            return None
        details = failure.details if isinstance(failure, EngineError) else ""
        return Failure(str(failure), details, isinstance(failure, UserError))

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()


def _remove_with_us(ports: Ports) -> int:
    """Starts a process that removes the directories when this one ends, and returns the pipe that it watches. Ray kills
    this process and its children without notice, so none of them could remove anything; the new process is not a
    child."""
    reading, writing = os.pipe()
    try:
        words = ["sh", "-c", REMOVE_BEHIND_US, "sh", ports.root, ports.shared_arrays]
        subprocess.run(words, stdin=reading, check=True, start_new_session=True)  # Ray kills process groups too
    finally:
        os.close(reading)
    return writing


@contextlib.contextmanager
def _without_main_module() -> Iterator[None]:
    """Keeps children from importing the program of Ray's worker, which they do not need."""
    main = sys.modules["__main__"]
    file = main.__dict__.pop("__file__", None)
    try:
        yield
    finally:
        if file is not None:
            main.__file__ = file
