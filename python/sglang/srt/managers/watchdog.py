"""Ends a process that is stuck, with the stacks of all threads in the log: a hung server must not look alive."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time

logger = logging.getLogger(__name__)

EXIT_CODE = 3


def beat_seconds(limit_s: float) -> float:
    """Returns the interval in seconds of checks and signs of life, where nothing may be stuck for `limit_s`."""
    return min(limit_s / 4, 5.0)


class Watchdog:
    """Watches that between `busy()` and `idle()` no more than `limit_s` seconds pass without another call of either."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._busy_since: float | None = None
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def busy(self) -> None:
        self._busy_since = time.monotonic()

    def idle(self) -> None:
        self._busy_since = None

    def _watch(self) -> None:
        while True:
            time.sleep(beat_seconds(self.limit_s))
            since = self._busy_since
            if since is not None and time.monotonic() - since > self.limit_s:
                logger.error("A step has not ended for %g seconds (--watchdog-timeout); giving up.", self.limit_s)
                faulthandler.dump_traceback(all_threads=True)
                sys.stderr.flush()
                os._exit(EXIT_CODE)
