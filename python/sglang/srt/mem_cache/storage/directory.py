"""Ownership of a store's directory, and the key of entries where other users may write.

Whoever can change an entry can choose the answers of every server that reads it. So no other user may be able to
replace any part of the path to the directory, and where others may write, entries have a digest with a secret key.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from sglang.srt.errors import UserError

KEY_BYTES = 32
MAX_LINKS = 40
"""Linux's own limit of links followed."""
_WRITE_OF_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_KEY_POLLS, _KEY_POLL_S = 40, 0.05
"""Time for another process to write a key that it has created."""


def lstat(path: Path) -> os.stat_result:
    """Returns the state of the path itself, not of what a link leads to. Tests replace it."""
    return path.lstat()


def steps_to(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yields every directory and link on the way to a path, as the system resolves it. Raises OSError."""
    rest, here, links = list(path.absolute().parts[1:]), Path("/"), 0
    yield here, lstat(here)
    while rest:
        part = rest.pop(0)
        step = here.parent if part == ".." else here / part
        status = lstat(step)
        yield step, status
        if not stat.S_ISLNK(status.st_mode):
            here = step
            continue
        links += 1
        if links > MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = Path(os.readlink(step))
        here = Path("/") if target.is_absolute() else here
        rest = [*target.parts[target.is_absolute() :], *rest]


def is_writable_by_others(directory: Path) -> bool:
    """Returns whether users other than this one and root may change a directory's content or replace the directory.
    Raises UserError if another user has put it, or a link to it, into a directory that everybody may write; raises
    OSError."""
    ours, shared = {os.getuid(), 0}, bool(directory.stat().st_mode & _WRITE_OF_OTHERS)
    for step, status in steps_to(directory):
        is_link, is_ours = stat.S_ISLNK(status.st_mode), status.st_uid in ours
        if not is_ours and (is_link or lstat(step.parent).st_mode & stat.S_IWOTH):
            raise UserError(f"{step} belongs to another user of this machine, who could change what it holds")
        # In a sticky directory no other user can replace our files.
        is_open = status.st_mode & _WRITE_OF_OTHERS and not status.st_mode & stat.S_ISVTX
        shared = shared or (not is_link and (not is_ours or bool(is_open)))
    return shared


def user_key(directory: Path) -> bytes:
    """Returns the key of this user's entries in a directory, which nobody else can read; creates it the first time.
    Raises UserError if the file belongs to another user, and OSError."""
    path = directory / f".key-{os.getuid()}"
    for _ in range(_KEY_POLLS):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            _create_key(path)
            continue
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            is_alone = stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and not status.st_mode & 0o077
            if status.st_uid != os.getuid() or not is_alone:
                raise UserError(f"{path} is not this user's alone: remove it")
            key = file.read(KEY_BYTES)
        if len(key) == KEY_BYTES:
            return key
        time.sleep(_KEY_POLL_S)
    raise UserError(f"{path} is no key of {KEY_BYTES} bytes: remove it")


def _create_key(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:  # another rank was faster
        return
    with os.fdopen(descriptor, "wb") as file:
        file.write(secrets.token_bytes(KEY_BYTES))
