"""Traces of a scheduler process by torch.profiler, switched on and off over HTTP."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

MAX_STEPS = 500
"""Number of steps that a trace records, because a trace stays in main memory until it is written: some MiB a step."""


class ProfileError(Exception):
    """Raised when a trace cannot be started or written; the message says why."""


class Profiler:
    """Records at most one trace at a time; each ends in a file that chrome://tracing and Perfetto read."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory
        self._rank = rank
        self._trace: torch.profiler.profile | None = None
        """The trace that has begun and is not written."""
        self._steps_left = 0
        """Number of steps that the trace still records."""

    def start(self) -> None:
        """Starts a trace of the next `MAX_STEPS` steps at most. Raises ProfileError."""
        import torch

        if self._trace is not None:
            raise ProfileError("A trace is running already; call /stop_profile first.")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            trace = torch.profiler.profile()
            trace.start()
        except (OSError, RuntimeError) as error:
            raise ProfileError(f"The trace was not started: {error}.") from error
        self._trace, self._steps_left = trace, MAX_STEPS

    def count_step(self) -> None:
        """Counts a step of the scheduler. Behind the last one that a trace records, the recording ends, and
        /stop_profile writes what there is."""
        if self._trace is None or not self._steps_left:
            return
        self._steps_left -= 1
        if not self._steps_left:
            logger.warning("The trace has %d steps and records no more; /stop_profile writes it.", MAX_STEPS)
            try:
                self._trace.stop()
            except RuntimeError as error:
                logger.warning("The trace is lost: %s", error)
                self._trace = None

    def stop(self) -> Path:
        """Writes the trace and returns its path. Raises ProfileError; the trace is lost then, and another may start."""
        if self._trace is None:
            raise ProfileError("No trace is running; call /start_profile first.")
        trace, self._trace = self._trace, None
        path = self._directory / f"sglang-{time.time_ns()}-TP{self._rank}.trace.json.gz"
        try:
            if self._steps_left:
                trace.stop()
            trace.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            path.unlink(missing_ok=True)
            raise ProfileError(f"The trace was not written to {self._directory}: {error}.") from error
        return path
