"""Receives signals even if the main thread hangs, and ends the process if its shutdown takes too long.

A thread of its own reads the signals from a pipe, as Python runs handlers in the main thread only. A timer that needs
no lock of Python's prints the stacks of all threads and exits with status 1.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from sglang.srt.environ import envs

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class ExitGuard:
    """Watches signals and the end of this process. Make one a process, in its main thread."""

    def __init__(self, on_signal: Callable[[], None]) -> None:
        """on_signal(): called for each signal, in the guard's thread. Raises UserError for a variable that is wrong."""
        self.limit_s = envs.SGLANG_END_TIMEOUT
        """Seconds from the end of the drain until the process is gone."""
        self.drain_s = 0.0
        """Seconds that work may go on after the first signal."""
        self._on_signal = on_signal
        self._num_signals = 0
        self._deadline = float("inf")
        self._lock = threading.Lock()
        """Held while the deadline is moved."""
        reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        for number in _SIGNALS:
            signal.signal(number, _ignore_signal)
        self.take_signals()
        threading.Thread(target=self._listen, args=(reading,), name="signals", daemon=True).start()

    def take_signals(self) -> None:
        """Has the system write signals to the pipe. Call it again in the main thread after an event loop has started,
        as loops take the signals over."""
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)

    def end_within(self, seconds: float) -> None:
        """Ends the process if it still runs after this time. The earliest of several limits counts, so that repeated
        Ctrl-C does not postpone it."""
        with self._lock:
            now = time.monotonic()
            if now + seconds < self._deadline:
                self._deadline = now + seconds
                faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or sys.stderr)

    def _listen(self, reading: int) -> None:
        while True:
            if os.read(reading, 1)[0] in _SIGNALS:  # the pipe gets all signals with handlers
                self._num_signals += 1
                self.end_within(self.limit_s + (self.drain_s if self._num_signals == 1 else 0.0))
                with contextlib.suppress(RuntimeError):  # the event loop has ended
                    self._on_signal()


def _ignore_signal(*_: object) -> None:
    """Does nothing, but keeps the system's default action (ending the process) from happening."""
