"""Arrays shared by processes of one host, as files in a directory that only the user can enter.

The front writes the pixels of an image once, and every rank reads them. A message carries name, shape and type
(`SharedArray`); readers validate all three.
"""

from __future__ import annotations

import math
import os
import re
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec

if TYPE_CHECKING:
    import numpy as np  # messages are decoded without numpy

DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1, "int32": 4, "int64": 8}
"""Bytes of a value by type."""
_HELD_AS = {"bfloat16": "int16"}
"""Types that numpy lacks, and the type that holds their bits."""
MAX_BYTES = 1 << 33
MAX_DIMS = 8
_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")


class SharedArray(msgspec.Struct):
    """A shared array. `name`: of its file in the server's directory of shared arrays."""

    name: str
    shape: list[int]
    dtype: str


class SharedArrayError(ValueError):
    """Raised when a message's description of an array is invalid, or does not fit its file."""


def write(directory: Path, array: np.ndarray, prefix: str = "array", dtype: str | None = None) -> SharedArray:
    """Writes a new file with mode 0600, whose name begins with `prefix`. dtype: type of the values, if the array holds
    only their bits. Raises SharedArrayError for an unsupported type or size, OSError for a full disk; then no file
    remains."""
    import numpy as np

    shared = SharedArray(f"{prefix}-{uuid.uuid4().hex}", list(array.shape), dtype or array.dtype.name)
    if array.dtype.itemsize != DTYPES.get(shared.dtype, array.dtype.itemsize):
        raise SharedArrayError(f"values of {array.dtype.name} do not hold those of {shared.dtype}")
    path = _checked(directory, shared)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            np.ascontiguousarray(array).tofile(file)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return shared


def append(directory: Path, shared: SharedArray, offset: int, data: bytes) -> None:
    """Writes a part of an array of another machine: the first part creates the file, later ones are appended. Raises
    SharedArrayError for a part that is not the next one or is too long, and OSError for a full disk; then no file
    remains."""
    path = _checked(directory, shared)
    if offset < 0 or offset + len(data) > num_bytes(shared):
        raise SharedArrayError(f"{len(data)} bytes from {offset} on are not in the shared array {shared.name}")
    begins = os.O_CREAT | os.O_EXCL if offset == 0 else os.O_APPEND
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_NOFOLLOW | begins, 0o600), "wb") as file:
        try:
            if os.fstat(file.fileno()).st_size != offset:
                raise SharedArrayError(f"a part of the shared array {shared.name} is missing before {offset}")
            file.write(data)
            file.flush()
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def read(directory: Path, shared: SharedArray) -> np.ndarray:
    """Maps the file read-only without a copy; it may be unlinked meanwhile. Returns the bits of types that numpy lacks.
    Raises SharedArrayError, and FileNotFoundError if it is gone."""
    import numpy as np

    with opened(directory, shared) as file:
        dtype = np.dtype(_HELD_AS.get(shared.dtype, shared.dtype))
        if math.prod(shared.shape) == 0:
            return np.empty(shared.shape, dtype)
        return np.memmap(file, dtype, "r", shape=tuple(shared.shape))


def opened(directory: Path, shared: SharedArray) -> BinaryIO:
    """Opens the file, which may be unlinked meanwhile, at its first byte, without reading ahead. Raises like `read`."""
    descriptor = os.open(_checked(directory, shared), os.O_RDONLY | os.O_NOFOLLOW)
    file = os.fdopen(descriptor, "rb", buffering=0)
    size = os.fstat(descriptor).st_size
    if size != num_bytes(shared):
        file.close()
        raise SharedArrayError(f"the shared array {shared.name} has {size} bytes, not those of {shared.shape}")
    return file


def num_bytes(shared: SharedArray) -> int:
    """Returns the bytes of the array's values."""
    return math.prod(shared.shape) * DTYPES[shared.dtype]


def remove_all(directory: Path, prefix: str) -> None:
    """Unlinks all files written with this prefix, also incomplete ones."""
    for path in directory.glob(f"{prefix}-*"):
        path.unlink(missing_ok=True)


def remove(directory: Path, shared: SharedArray) -> None:
    """Unlinks the file, if it still exists; processes that have mapped it keep it."""
    _checked(directory, shared).unlink(missing_ok=True)


def remove_named(directory: Path, name: str) -> None:
    """Unlinks the file of an array of any shape, if it still exists."""
    _named(directory, name).unlink(missing_ok=True)


def _checked(directory: Path, shared: SharedArray) -> Path:
    if shared.dtype not in DTYPES:
        raise SharedArrayError(f"arrays of type {shared.dtype!r} are not shared")
    if len(shared.shape) > MAX_DIMS or any(size < 0 for size in shared.shape):
        raise SharedArrayError(f"{shared.shape} is no shape of a shared array")
    if math.prod(shared.shape) * DTYPES[shared.dtype] > MAX_BYTES:
        raise SharedArrayError(f"a shared array of shape {shared.shape} is larger than {MAX_BYTES} bytes")
    return _named(directory, shared.name)


def _named(directory: Path, name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise SharedArrayError(f"{name!r} is no name of a shared array")
    return directory / name
