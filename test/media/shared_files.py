"""What a server keeps in its directory of shared arrays."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from live_server import LiveServer


def arrays_of(server: LiveServer) -> list[str]:
    """Names of the files, in directories that are no older than the server."""
    bases = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    directories = [path for base in bases for path in base.glob("sglang-arrays-*")]
    mine = [path for path in directories if path.stat().st_mtime >= server.log_path.parent.stat().st_mtime - 1]
    assert mine, "the server has no such directory"
    return [name for path in mine for name in os.listdir(path)]
