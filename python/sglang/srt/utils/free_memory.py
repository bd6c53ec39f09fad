"""Memory that the process has freed and the C library keeps."""

from __future__ import annotations

import ctypes
import gc


def release_free_memory() -> None:
    """Gives it back to the system, after a collection of cycles. Takes milliseconds; without glibc it only collects."""
    gc.collect()
    trim_allocator()


def trim_allocator() -> None:
    """Gives it back to the system. Other threads go on meanwhile, but for those that allocate; without glibc it does
    nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
