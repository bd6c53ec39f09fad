"""The system's cache of files, which is dropped where weights are kept in main memory anyway."""

from __future__ import annotations

import os
from pathlib import Path


def forget(path: Path) -> None:
    """Has the system drop what it keeps of a file that no process reads any more. Does nothing where that is
    unknown."""
    if not hasattr(os, "posix_fadvise"):
        return
    file = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)
