"""What servers that were killed have left behind: directories of sockets and shared arrays, and files of sent tensors.

A server holds a lock in its directory as long as it lives, whatever ends it, so another one that starts can tell.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from sglang.srt.utils import sent_tensors

LOCK = "lock"
SENT_FOR_S = 3600.0
"""Seconds after which a file of sent tensors is of no use, if its process does not live."""
_held: dict[str, int] = {}
"""By directory, the open file whose lock says that it is in use."""


def hold(root: str) -> None:
    """Marks a directory as in use until `let_go`, or the end of this process."""
    path = os.path.join(root, LOCK)
    lock = os.open(f"{path}.new", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(f"{path}.new", path)  # whoever sees it finds it locked
    _held[root] = lock


def let_go(root: str) -> None:
    """Ends the mark, where this process has made it."""
    if (lock := _held.pop(root, None)) is not None:
        os.close(lock)


def remove_left(memory_files: str | None) -> None:
    """Removes what servers of this user have left that do not live. memory_files: the directory of shared arrays."""
    for lock in Path(tempfile.gettempdir()).glob(f"sglang-*/{LOCK}"):
        if not _is_left(lock):
            continue
        root = lock.parent
        if memory_files is not None:
            for arrays in Path(memory_files).glob(f"{root.name}-arrays-*"):
                shutil.rmtree(arrays, ignore_errors=True)
        shutil.rmtree(root, ignore_errors=True)
    for path in sent_tensors.FOLDER.glob(f"{sent_tensors.PREFIX}*"):
        with suppress(OSError, ValueError):
            process = int(path.name.removeprefix(sent_tensors.PREFIX).partition("-")[0])
            if time.time() - path.lstat().st_mtime > SENT_FOR_S and not Path(f"/proc/{process}").exists():
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _is_left(lock: Path) -> bool:
    try:
        file = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # another user's, or gone
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(file)
    return lock.stat().st_uid == os.geteuid() if lock.exists() else False
