"""Kills child processes. One in an uninterruptible system call outlives SIGKILL, so the wait is limited."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
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
