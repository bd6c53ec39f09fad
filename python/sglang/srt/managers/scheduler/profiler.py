"""Traces of a scheduler process by torch.profiler, switched on and off over HTTP."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Profiler:
    """Records at most one trace at a time; each ends in a file that chrome://tracing and Perfetto read."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory
        self._rank = rank
        self._running: torch.profiler.profile | None = None

    def start(self) -> str:
        """Starts a trace. Returns what is wrong, or an empty string."""
        import torch

        if self._running is not None:
            return "A trace is running already; call /stop_profile first."
        self._running = torch.profiler.profile()
        self._running.start()
        return ""

    def stop(self) -> Path | None:
        """Writes the trace and returns its path; None if there is none."""
        if self._running is None:
            return None
        self._running.stop()
        path = self._directory / f"sglang-{time.time_ns()}-TP{self._rank}.trace.json.gz"
        self._directory.mkdir(parents=True, exist_ok=True)
        self._running.export_chrome_trace(str(path))
        self._running = None
        return path
