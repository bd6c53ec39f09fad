"""Kills child processes, and ends parts of the server at the same time. A process in an uninterruptible system call
outlives SIGKILL, so waits are limited."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing.process import BaseProcess

logger = logging.getLogger(__name__)

REAP_LIMIT_S = 1.0
"""Seconds to wait for killed processes."""


def reap(processes: Iterable[BaseProcess]) -> None:
    """Kills processes and waits for their end, for a limited time."""
    killed = list(processes)
    for process in killed:
        process.kill()
    end = time.monotonic() + REAP_LIMIT_S
    for process in killed:
        process.join(max(0.0, end - time.monotonic()))
        if process.exitcode is None:
            logger.warning("Process %d (%s) does not end although it was killed.", process.pid or 0, process.name)


def close_together(closers: Iterable[Callable[[], object]]) -> None:
    """Calls functions, each of which ends a part of the server and may wait, at the same time, and returns when all
    have returned. Logs their errors. Each is called in a daemon thread, so one that hangs does not keep the program
    from exiting."""
    threads = []
    for close in closers:
        thread = threading.Thread(target=_close, args=(close,), name="closing", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # an interpreter that is ending starts no threads (`atexit`)
            _close(close)
        else:
            threads.append(thread)
    for thread in threads:
        thread.join()


def _close(close: Callable[[], object]) -> None:
    try:
        close()
    except Exception:
        logger.exception("A part of the server did not end in order.")
