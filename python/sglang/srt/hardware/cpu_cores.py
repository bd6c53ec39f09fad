"""Physical cores of this machine, for threads that compute."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from sglang.srt.hardware.numa import SYSFS, parse_cpu_list

ANY_CPU = -1


def cores(sysfs: Path = SYSFS, allowed: Collection[int] | None = None) -> list[int]:
    """Returns one CPU of each physical core of the allowed CPUs; None: those that this process may use."""
    allowed = frozenset(os.sched_getaffinity(0) if allowed is None else allowed)
    usable = []
    for cpu in sorted(allowed):
        try:
            text = (sysfs / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
            siblings = parse_cpu_list(text) & allowed
        except (OSError, ValueError):
            siblings = frozenset({cpu})
        if cpu == min(siblings, default=cpu):
            usable.append(cpu)
    return usable


def threads_on_cores(threads: int, sysfs: Path = SYSFS) -> list[int]:
    """Returns a CPU for each of so many threads: a core for each, the last cores, so that the first are left to other
    work; any CPU for all if there are fewer cores than threads, or no more."""
    usable = cores(sysfs)
    return usable[-threads:] if len(usable) > threads else [ANY_CPU] * threads
