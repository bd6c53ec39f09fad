"""Physical cores of this machine, for threads that compute."""

from __future__ import annotations

import os
from pathlib import Path

from sglang.srt.hardware.numa import SYSFS, parse_cpu_list

ANY_CPU = -1


def cores(sysfs: Path = SYSFS) -> list[int]:
    """Returns one CPU of each physical core that this process may use."""
    allowed = os.sched_getaffinity(0)
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
