"""What runs on a node: an actor that starts the ranks of one machine of a replica, and says how they do.

The ranks are its children, as they are those of a server: when it ends, however that comes, they end too.
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
"""A shell's words: when its stdin ends, the directories go."""
NUM_PORTS = 3
"""Of a machine: the meeting of the ranks, and the two channels from and to the front."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the processes of a machine have ended, as plain values. of_user: the user can correct it."""

    message: str
    details: str = ""
    of_user: bool = False

    def error(self) -> UserError | EngineError:
        return UserError(self.message) if self.of_user else EngineError(self.message, self.details)


class Machine:
    """An actor. Its methods run in threads beside one another; plain values go in and out."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._processes: EngineProcesses | None = None
        self._ports: Ports | None = None
        self._ended = False
        self._alive: int | None = None
        """A pipe that ends with this process."""

    def facts(self, address: str) -> tuple[str, list[int]]:
        """Returns the release, and ports of the node's address that nothing uses."""
        return __version__, free_ports(address, NUM_PORTS)

    def start(self, args: ServerArgs, ports: Ports, keys: Keys, name: str, environment: Mapping[str, str]) -> None:
        """Starts the ranks of this machine. ports: as the front has them; environment: what the front's has too."""
        os.environ.update(environment)
        configure_logging(args.log_level)
        with self._changed:
            if self._ended:
                return
            self._ports = ports.on_other_machine(keys)
            self._alive = _remove_with_us(self._ports)
            with _light_main():
                self._processes = start_processes(args, self._ports, name, self._notify)
            self._processes.watch()

    def ready_or_failed(self) -> Failure | None:
        """Returns when all ranks are ready, or why they cannot be."""
        return self._wait_for(lambda processes: processes.ready or processes.failure is not None)

    def failed(self) -> Failure | None:
        """Returns why the ranks have ended; None: they were told to."""
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
        """Waits until it is so, or all is ended, and returns the failure that there is."""
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
    """Lets the directories go with this process. Ray kills it and its children without a word, so that none of them
    could do it; this one is no child. Returns the pipe that says so."""
    reading, writing = os.pipe()
    try:
        words = ["sh", "-c", REMOVE_BEHIND_US, "sh", ports.root, ports.shared_arrays]
        subprocess.run(words, stdin=reading, check=True, start_new_session=True)  # Ray kills process groups, too
    finally:
        os.close(reading)
    return writing


@contextlib.contextmanager
def _light_main() -> Iterator[None]:
    """Children need nothing of the program that runs Ray's worker, which they would import otherwise."""
    main = sys.modules["__main__"]
    file = main.__dict__.pop("__file__", None)
    try:
        yield
    finally:
        if file is not None:
            main.__file__ = file
