"""Ends a stuck process, with the stacks of all threads in the log, because a hung server must not look alive."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time

logger = logging.getLogger(__name__)

EXIT_CODE = 3


def heartbeat_seconds(limit_s: float) -> float:
    """Returns the interval in seconds of checks and signs of life for a silence limit of `limit_s`."""
    return min(limit_s / 4, 5.0)


class Watchdog:
    """Ends the process if after `busy()` more than `limit_s` seconds pass without another call of `busy()` or `idle()`.

    An exception that leaves its `with` block ends the step: a collective that gave up just in time says more about what
    it waited for than a watchdog does, so its report is not cut short.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._busy_since: float | None = None
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def busy(self) -> None:
        """Restarts the time limit."""
        self._busy_since = time.monotonic()

    def idle(self) -> None:
        """Stops the time limit."""
        self._busy_since = None

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(self, *_: object) -> None:
        self.idle()

    def _watch(self) -> None:
        while True:
            time.sleep(heartbeat_seconds(self.limit_s))
            since = self._busy_since
            if since is not None and time.monotonic() - since > self.limit_s:
                # Comes first, because the step may end while the message is written.
                faulthandler.dump_traceback(all_threads=True)
                logger.error("The step above has not ended for %g s (--watchdog-timeout); giving up.", self.limit_s)
                sys.stderr.flush()
                os._exit(EXIT_CODE)
