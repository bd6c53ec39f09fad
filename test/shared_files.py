"""What a server keeps in files of shared memory, told from the files of servers beside it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def array_directories(directory: Path) -> list[Path]:
    """Of the server whose TMPDIR is `directory`, while its sockets are there."""
    bases = (SHARED_MEMORY, directory, Path(tempfile.gettempdir()))
    return [
        found for own in directory.glob("sglang-*") for base in bases for found in base.glob(f"{own.name}-arrays-*")
    ]


def arrays_of(directory: Path) -> list[str]:
    """Names of the shared arrays of the server whose TMPDIR is `directory`."""
    directories = array_directories(directory)
    assert directories, "the server has no such directory"
    return [name for path in directories for name in os.listdir(path)]


def mapped_files(pids: list[int]) -> set[Path]:
    """The files of shared memory that these processes have mapped or opened."""
    found: set[Path] = set()
    for pid in pids:
        try:
            mapped = [line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
            opened = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue  # it has ended, or a descriptor was closed meanwhile
        found |= {Path(name.removesuffix(" (deleted)")) for name in (*mapped, *opened) if name.startswith("/dev/shm/")}
    return found
