"""Store with entries as files of a directory, which several servers may share.

`DIRECTORY/ab/abcd..` is the entry `abcd..`. A file is written under a temporary name and renamed, so a crash leaves
only temporary files, which are removed when they are old. A file's modification time is the time of its last use.
"""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import shutil
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from sglang.srt.configs.storage_options import FILE_KEYS, read_size, refuse_unknown
from sglang.srt.environ import envs
from sglang.srt.errors import UserError
from sglang.srt.mem_cache.storage.directory import is_writable_by_others, user_key
from sglang.srt.mem_cache.storage.file_sizes import NAME, TEMPORARY, DirectorySpace

GIB = 1 << 30
DEFAULT_FREE_BYTES = 10 * GIB
"""Bytes that stay free on the file system by default; a tenth of it, if that is less."""
USE_STEP_NS = 1000
"""Difference between the times of use of entries that are used together, so that their order is known."""
NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO)
"""Errors of opening a path that is not a file: a link, a directory or a socket."""


class FileTransfer(Protocol):
    """How the content of an open file is moved. The methods are called from several threads at once."""

    def read(self, file: int, data: bytearray) -> int:
        """Reads the beginning of a file into `data`. Returns the number of bytes, fewer only where the file ends."""

    def write(self, file: int, data: bytearray) -> None:
        """Writes all of `data` to the beginning of a file."""


class SystemCalls:
    """Moves by read and write. Implements FileTransfer."""

    def read(self, file: int, data: bytearray) -> int:
        count = 0
        while count < len(data) and (more := os.readv(file, [memoryview(data)[count:]])):
            count += more
        return count

    def write(self, file: int, data: bytearray) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(file, rest) :]


class FileStore:
    """Implements PrefixStore. `key`: secret of its entries' digests; empty where no other user may write."""

    def __init__(
        self,
        directory: Path,
        max_bytes: int | None = None,
        min_free: int | None = None,
        keep_ratio: float = 0.9,
        transfer: FileTransfer | None = None,
    ) -> None:
        """max_bytes: of all files in the directory; None: no limit. min_free: bytes that stay free on the file system;
        None: DEFAULT_FREE_BYTES. keep_ratio: share of `max_bytes` that an eviction leaves. transfer: None:
        SystemCalls. Raises UserError."""
        self.directory, self._transfer = directory, transfer or SystemCalls()
        self._prepare()
        if min_free is None:
            min_free = min(DEFAULT_FREE_BYTES, shutil.disk_usage(directory).total // 10)
        self.space = DirectorySpace(directory, max_bytes, min_free, keep_ratio)
        self._writer = secrets.token_hex(8)
        """In the names of temporary files: process ids repeat in other containers."""
        self._numbers = itertools.count()

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> FileStore:
        """Makes a store from `options`, which take precedence over environment variables. Raises UserError."""
        refuse_unknown(options, FILE_KEYS, "file")
        return cls.in_directory(options, envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR)

    @classmethod
    def in_directory(
        cls,
        options: Mapping[str, Any],
        default: Path,
        transfer: FileTransfer | None = None,
        free_share: float | None = None,
    ) -> FileStore:
        """Makes a store from checked `options`. default: its directory, if they name none. free_share: the share of the
        file system that stays free, if they do not say how many bytes do. Raises UserError."""
        named = options.get("storage_dir")
        directory = default if named is None else Path(str(named)).expanduser()
        ratio = options.get("eviction_ratio", envs.SGLANG_HICACHE_FILE_BACKEND_EVICTION_RATIO)
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1:
            raise UserError(f"--hicache-storage-backend-extra-config: eviction_ratio must be in (0, 1]; got {ratio!r}.")
        max_bytes = read_size(options, "max_size", envs.SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE)
        min_free = read_size(options, "min_free_space", envs.SGLANG_HICACHE_FILE_BACKEND_MIN_FREE_SPACE)
        store = cls(directory, max_bytes or None, min_free, float(ratio), transfer)
        if min_free is None and free_share is not None:
            store.space.min_free = int(free_share * shutil.disk_usage(directory).total)
        return store

    def _prepare(self) -> None:
        where = f"the directory of cached prefixes, {self.directory},"
        advice = "Name another one by SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR, or remove --hicache-storage-backend."
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.listdir(self.directory)
            self.key = user_key(self.directory) if is_writable_by_others(self.directory) else b""
        except (OSError, UserError) as error:
            raise UserError(f"{where} cannot be used: {error}. {advice}") from None

    # --- PrefixStore --------------------------------------------------------------------------------------------------

    def contains(self, names: Sequence[str]) -> list[bool]:
        """Returns which entries exist, and counts those as used now."""
        now, there = time.time_ns(), []
        for index, name in enumerate(names):
            there.append(self._touch(self._path(name), now - index * USE_STEP_NS))
        return there

    @staticmethod
    def _touch(path: Path, used_at: int) -> bool:
        try:
            os.utime(path, ns=(used_at, used_at), follow_symlinks=False)
        except FileNotFoundError:
            return False
        except OSError:  # the directory is read-only
            return path.exists()
        return True

    def read(self, name: str) -> bytearray | None:
        """Returns an entry; None if there is none. Removes a pipe, link or the like that has the entry's name."""
        try:
            with open(self._path(name), "rb", buffering=0, opener=_open_at_once) as file:
                status = os.fstat(file.fileno())
                data = bytearray(status.st_size if stat.S_ISREG(status.st_mode) else 0)
                count = self._transfer.read(file.fileno(), data)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in NO_FILE:
                return bytearray()
            raise
        del data[count:]
        return data

    def write(self, name: str, data: bytearray) -> None:
        """Writes an entry by renaming a complete file. Raises OSError."""
        path = self._path(name)
        temporary = path.with_name(f"{TEMPORARY}{self._writer}-{next(self._numbers)}")
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if path.parent.is_symlink():  # another user may have made it
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path.parent))
        self.space.make_room(len(data))
        try:
            with open(temporary, "xb", buffering=0) as file:
                self._transfer.write(file.fileno(), data)
            self.space.place(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            with suppress(OSError):
                self.space.give_back(len(data))
            raise

    def delete(self, name: str) -> None:
        self.space.remove(self._path(name))

    def _path(self, name: str) -> Path:
        assert NAME.fullmatch(name), "a name of an entry is no path"
        return self.directory / name[1:3] / name


def _open_at_once(path: str, flags: int) -> int:
    """Opens a file without blocking on a pipe and without following a link."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)
