"""Limits of the room that a directory's entries take, and eviction of the least recently used ones.

All processes that write there share one total, in a file that they lock. The directory is scanned at the start, and
again when the oldest entries of the last scan are gone, so the work for one entry does not grow with the directory.
"""

from __future__ import annotations

import errno
import fcntl
import heapq
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

NAME = re.compile(r"[0-9a-z]{65}")
TEMPORARY = ".tmp-"
STALE_S = 600.0
"""Seconds after which a temporary file counts as left by a crash."""
RESCAN_S = 600.0
"""Seconds after which a scan is too old, as other processes write and remove entries too."""
MAX_CANDIDATES = 1 << 16
"""Entries that a scan remembers for eviction: the least recently used ones."""
GIVES_WAY = 4
"""Most bytes that are evicted for each byte written when other programs fill the disk. Beyond that nothing is evicted
or written, because emptying the store would not free a disk that fills up at once."""
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""Errors of file systems without locks; processes may then exceed the limit by what they write at the same time."""


@dataclass(slots=True)
class _Total:
    """Bytes of all entries, used while the file that stores it is locked; None: not counted yet."""

    value: int | None

    def subtract(self, size: int) -> None:
        """Subtracts `size` bytes, if the total has been counted."""
        if self.value is not None:
            self.value = max(0, self.value - size)


class DirectorySpace:
    """Keeps one process's writes to a directory within its limits. All methods may be called from several threads."""

    def __init__(self, directory: Path, max_bytes: int | None, min_free: int, keep_ratio: float) -> None:
        self.directory, self.max_bytes, self.min_free, self.keep_ratio = directory, max_bytes, min_free, keep_ratio
        self._lock = threading.Lock()
        """Guards the fields below."""
        self._oldest: list[tuple[int, int, str]] = []
        """Last use in ns, size and path of what the last scan found, the least recently used at the end. What has been
        used or written since is newer than all of it."""
        self._scanned = -RESCAN_S
        self._largest_total = 0
        """The most bytes of entries that this process has seen."""

    def make_room(self, size: int) -> None:
        """Counts an entry of `size` bytes that is about to be written, evicting the least recently used ones until it
        fits. Raises OSError if it does not fit."""
        with self._lock, self._shared_total() as total:
            if self.max_bytes is not None:
                self._make_room_below(self.max_bytes, size, total)
            missing = self.min_free + size - shutil.disk_usage(self.directory).free
            if missing > 0:
                self._make_room_on_disk(missing, size, total)
            total.value = (total.value or 0) + size

    def place(self, temporary: Path, path: Path) -> None:
        """Renames a finished entry, for which room was made, to its name. Subtracts an entry that had the name before:
        ranks with equal caches write the same entries at once."""
        with self._lock, self._shared_total() as total:
            replaced = _size(path)
            os.replace(temporary, path)
            total.subtract(replaced)

    def remove(self, path: Path) -> None:
        """Removes an entry, if there is one."""
        with self._lock, self._shared_total() as total, suppress(FileNotFoundError, IsADirectoryError):
            size = _size(path)
            path.unlink()
            total.subtract(size)

    def give_back(self, size: int) -> None:
        """Subtracts the room of an entry that was not written."""
        with self._lock, self._shared_total() as total:
            total.subtract(size)

    def _make_room_below(self, limit: int, size: int, total: _Total) -> None:
        if total.value is None or not self._largest_total:
            self._scan(total)
        assert total.value is not None
        if total.value + size <= limit:
            return
        if time.monotonic() - self._scanned >= RESCAN_S:
            self._scan(total)
        if total.value + size > limit:
            self._evict(total.value + size - int(self.keep_ratio * limit), total)
        if total.value + size > limit:
            raise OSError(f"an entry of {size:,} bytes does not fit into {limit:,} bytes")

    def _make_room_on_disk(self, missing: int, size: int, total: _Total) -> None:
        if total.value is None or not self._largest_total:
            self._scan(total)
        assert total.value is not None
        self._largest_total = max(self._largest_total, total.value)
        exchanges = missing <= size
        if exchanges or missing <= min(GIVES_WAY * size, total.value - self._largest_total // 2):
            self._evict(missing, total)
        if shutil.disk_usage(self.directory).free < self.min_free + size:
            raise OSError(f"fewer than {self.min_free:,} bytes would stay free on the file system")

    def _evict(self, num_bytes: int, total: _Total) -> None:
        """Removes at least `num_bytes` bytes of entries, if there are that many."""
        assert total.value is not None
        minimum, scanned = total.value - num_bytes, False
        while total.value > minimum:
            if not self._oldest:
                if scanned:
                    return
                self._scan(total)
                scanned = True
                continue
            used_at, length, path = self._oldest.pop()
            with suppress(FileNotFoundError):
                if os.lstat(path).st_mtime_ns == used_at:
                    os.unlink(path)
                    total.value -= length

    def _scan(self, total: _Total) -> None:
        count = 0

        def entries() -> Iterator[tuple[int, int, str]]:
            nonlocal count
            for entry in self._files():
                count += entry[1]
                yield entry

        self._oldest = heapq.nsmallest(MAX_CANDIDATES, entries())[::-1]
        self._scanned = time.monotonic()
        total.value, self._largest_total = count, max(self._largest_total, count, 1)

    def _files(self) -> Iterator[tuple[int, int, str]]:
        """Yields last use in ns, size and path of every entry. Removes temporary files left by a crash; ignores other
        files."""
        for folder in os.scandir(self.directory):
            if len(folder.name) != 2 or not folder.is_dir(follow_symlinks=False):
                continue
            for entry in os.scandir(folder.path):
                with suppress(FileNotFoundError):  # another server was faster
                    status = entry.stat(follow_symlinks=False)
                    if entry.name.startswith(TEMPORARY) and time.time() - status.st_mtime > STALE_S:
                        os.unlink(entry.path)
                    elif NAME.fullmatch(entry.name):
                        yield status.st_mtime_ns, status.st_size, entry.path

    @contextmanager
    def _shared_total(self) -> Iterator[_Total]:
        """Locks the file with the total of this user's processes: other users may not write it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(self.directory / f".total-{os.getuid()}", flags, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
            text = os.pread(descriptor, 20, 0)
            total = _Total(int(text) if text.isdigit() else None)
            try:
                yield total
            finally:
                if total.value is not None:
                    os.pwrite(descriptor, b"%020d" % total.value, 0)
        finally:
            os.close(descriptor)


def _size(path: Path) -> int:
    """Returns the size of an entry in bytes; 0 if it does not exist."""
    with suppress(FileNotFoundError):
        return os.lstat(path).st_size
    return 0
