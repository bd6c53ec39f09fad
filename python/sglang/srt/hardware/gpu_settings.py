"""The driver and the limits that a GPU runs under, as nvidia-smi says: times measured under others do not count."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Run = Callable[[Sequence[str]], str]
"""Runs a program and returns its output. Raises OSError or subprocess.SubprocessError."""

FIELDS = ("driver_version", "power.limit", "clocks.applications.graphics", "clocks.max.sm", "clocks.max.memory")
SECONDS = 20


@dataclass(frozen=True, slots=True)
class GpuSettings:
    """Texts of nvidia-smi: watts, and MHz of the application clock, the SMs and the memory at most."""

    driver: str
    power_limit: str
    clocks: str


def gpu_settings(address: str | None, run: Run | None = None) -> GpuSettings | None:
    """Returns the settings of the GPU with this PCI address; None where they cannot be known. `run`: replaced by
    tests."""
    if address is None:
        return None
    words = ["nvidia-smi", f"--id={address}", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        output = (run or _run)(words)
    except (OSError, subprocess.SubprocessError):
        return None
    values = [value.strip() for value in output.strip().split(",")]
    if len(values) != len(FIELDS):
        return None
    driver, power_limit, *clocks = values
    return GpuSettings(driver, power_limit, "/".join(clocks))


def _run(words: Sequence[str]) -> str:
    return subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=True).stdout
