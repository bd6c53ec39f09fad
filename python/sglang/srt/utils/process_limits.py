"""Limits that a process sets on itself before it handles untrusted input."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")
_SIZES = Path("/proc/self/statm")


def die_with_parent() -> None:
    """Has the system kill this process when the thread that started it ends, as a computing process would not notice
    that."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def name_process(name: str) -> None:
    """Sets what `ps` and `top` show of this process: up to 15 bytes."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def limit_memory(more_bytes: int) -> None:
    """Limits the address space to its present size plus `more_bytes`; further allocations fail."""
    if _SIZES.exists():
        pages = int(_SIZES.read_text().split()[0])
        lower_limit(resource.RLIMIT_AS, pages * _PAGE_BYTES + more_bytes)


def lower_limit(kind: int, limit: int) -> None:
    """Lowers a system limit for good; keeps one that is lower already."""
    hard = resource.getrlimit(kind)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (limit, limit))
