"""Returns memory that the process has freed, and the C library kept, to the system."""

from __future__ import annotations

import ctypes
import gc


def release_free_memory() -> None:
    """Collects reference cycles and returns free memory to the system. Takes milliseconds; without glibc it only
    collects."""
    gc.collect()
    trim_allocator()


def trim_allocator() -> None:
    """Returns free memory to the system. Blocks only threads that allocate; without glibc it does nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
