"""Hears signals whatever the main thread does, and ends the process when its end takes too long.

A thread of its own reads the signals from a pipe: Python runs handlers in the main thread alone, which may hang. The
end comes from a timer that needs no lock of Python's: it prints the stacks of all threads, and exits with status 1.
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

END_LIMIT_S = 4.5
"""Seconds from the end of the drain until the process is gone; those who stop servers are told five."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class ExitGuard:
    """One a process; made in its main thread."""

    def __init__(self, on_signal: Callable[[], None]) -> None:
        """on_signal(): called in a thread of its own, for each signal."""
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
            signal.signal(number, _noticed)
        self.take_signals()
        threading.Thread(target=self._listen, args=(reading,), name="signals", daemon=True).start()

    def take_signals(self) -> None:
        """Has the system write signals to the pipe. Again in the main thread when an event loop has begun: those take
        them for themselves."""
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)

    def end_within(self, seconds: float) -> None:
        """Ends the process unless it has come to its end in this time. Of several calls the earliest end counts:
        whoever presses Ctrl-C again and again does not put it off."""
        with self._lock:
            now = time.monotonic()
            if now + seconds < self._deadline:
                self._deadline = now + seconds
                faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or sys.stderr)

    def _listen(self, reading: int) -> None:
        while True:
            if os.read(reading, 1)[0] in _SIGNALS:  # the pipe gets all that have handlers
                self._num_signals += 1
                self.end_within(END_LIMIT_S + (self.drain_s if self._num_signals == 1 else 0.0))
                with contextlib.suppress(RuntimeError):  # the event loop has ended
                    self._on_signal()


def _noticed(*_: object) -> None:
    """Is there so that the system's own action, the end of the process, does not happen."""
