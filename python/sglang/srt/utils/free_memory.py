"""Memory that the process has freed and the C library keeps."""

from __future__ import annotations

import ctypes


def release_free_memory() -> None:
    """Gives it back to the system. Milliseconds; does nothing where the C library is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
