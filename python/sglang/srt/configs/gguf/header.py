"""Reads the header of a GGUF file within limits: its metadata, and where its tensors are. No torch.

A file is untrusted: every length is compared with what is left of the file, and with a limit, before anything is read
or allocated. Source: the GGUF specification (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from sglang.srt.configs.gguf.types import TYPES, UNREAD, TensorType
from sglang.srt.errors import UserError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_NUMBERS: Mapping[int, str] = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""Codes of `struct` for the types of numbers in metadata."""

MAX_PAIRS = 1 << 12
MAX_TENSORS = 1 << 16
MAX_KEY_BYTES = 1 << 12
MAX_STRING_BYTES = 16 << 20
"""The longest string: templates have some thousand bytes."""
MAX_ITEMS = 1 << 21
"""The longest array: vocabularies have up to 262,144 tokens, and twice as many merges."""
MAX_ALL_ITEMS = 1 << 22
"""Items of all arrays together: an item that is one byte in the file is eight in a list."""
MAX_HEADER_BYTES = 256 << 20
MAX_NAME_BYTES = 256
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a file: its shape in the order of torch (rows first), its type, and its first byte in the file."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int

    @property
    def num_bytes(self) -> int:
        """Returns the size in the file."""
        return math.prod(self.shape) // self.type.elements * self.type.size


@dataclass(frozen=True, slots=True)
class Header:
    """The header of one file: `metadata` by key, and the tensors in the order of the file."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: tuple[TensorInfo, ...]


def read_header(path: Path) -> Header:
    """Returns the header of a GGUF file. Raises UserError, which names the file, for one that is damaged or has types
    that are not read."""
    try:
        with path.open("rb") as file:
            return _Reader(path, file).header()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None


class _Reader:
    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file, self.size = path, file, path.stat().st_size
        self.at = self.items = 0

    def header(self) -> Header:
        if self.size < len(MAGIC) or self._take(len(MAGIC), "the magic number") != MAGIC:
            raise self._damaged(f"it does not begin with {MAGIC.decode()}", hint="")
        self._check_version()
        num_tensors, num_pairs = self._count("tensors", MAX_TENSORS), self._count("metadata pairs", MAX_PAIRS)
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string("a key", MAX_KEY_BYTES)
            if key in metadata:
                raise self._damaged(f"the key {key!r} is there twice")
            metadata[key] = self._value(key)
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment must be a power of two up to {MAX_ALIGNMENT:,}, not {alignment!r}")
        described = [self._tensor() for _ in range(num_tensors)]
        data = -(-self.at // alignment) * alignment
        tensors = tuple(
            TensorInfo(name, shape, kind, self._place(name, shape, kind, offset, data, alignment))
            for name, shape, kind, offset in described
        )
        self._check_overlaps(tensors)
        return Header(self.path, metadata, tensors)

    def _check_version(self) -> None:
        (version,) = self._unpack("I", "the version")
        if version in _VERSIONS:
            return
        if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
            raise self._damaged("it is a big-endian file, which is not supported", hint="")
        raise self._damaged(f"GGUF version {version} is not supported (has 2 and 3)", hint="")

    def _value(self, key: str) -> Any:
        (kind,) = self._unpack("I", f"the type of {key}")
        if kind == _STRING:
            return self._string(key, MAX_STRING_BYTES)
        if kind in _NUMBERS:
            return self._unpack(_NUMBERS[kind], key)[0]
        if kind != _ARRAY:
            raise self._damaged(f"{key} has the unknown type {kind}")
        (item,) = self._unpack("I", f"the items' type of {key}")
        count = self._count(f"items of {key}", MAX_ITEMS)
        self.items += count
        if self.items > MAX_ALL_ITEMS:
            raise self._damaged(f"its arrays have more than {MAX_ALL_ITEMS:,} items")
        if item == _STRING:
            self._check_left(8 * count, key)
            return [self._string(key, MAX_STRING_BYTES) for _ in range(count)]
        if item in _NUMBERS:
            return list(self._unpack(f"{count}{_NUMBERS[item]}", key))
        what = "arrays, which no model needs" if item == _ARRAY else f"the unknown type {item}"
        raise self._damaged(f"the items of {key} are {what}" if item == _ARRAY else f"the items of {key} have {what}")

    def _tensor(self) -> tuple[str, tuple[int, ...], TensorType, int]:
        name = self._string("a tensor's name", MAX_NAME_BYTES)
        (num_dims,) = self._unpack("I", f"the dimensions of {name}")
        if not 1 <= num_dims <= MAX_DIMS:
            raise self._damaged(f"the tensor {name} has {num_dims} dimensions (1 to {MAX_DIMS} are possible)")
        dims = self._unpack(f"{num_dims}Q", f"the dimensions of {name}")
        number, offset = self._unpack("IQ", f"the type of {name}")
        kind = TYPES.get(number)
        if kind is None:
            named = UNREAD.get(number, f"number {number}")
            known = ", ".join(each.name for each in TYPES.values())
            raise UserError(f"{self.path}: the tensor {name} has the type {named}, which is not read (has {known}).")
        if not all(dims) or math.prod(dims) > 8 * self.size:  # no type has less than a byte for 8 elements
            raise self._damaged(f"the tensor {name} of {' x '.join(map(str, dims))} is larger than the file")
        if dims[0] % kind.elements:
            raise self._damaged(
                f"the rows of {name} have {dims[0]} elements, no multiple of {kind.elements} as {kind.name} needs"
            )
        return name, tuple(reversed(dims)), kind, offset

    def _place(
        self, name: str, shape: tuple[int, ...], kind: TensorType, offset: int, data: int, alignment: int
    ) -> int:
        """Returns where the tensor begins in the file."""
        if offset % alignment:
            raise self._damaged(f"the tensor {name} begins at {offset}, no multiple of {alignment}")
        size = math.prod(shape) // kind.elements * kind.size
        if data + offset + size > self.size:
            raise self._damaged(f"the tensor {name} ends {data + offset + size - self.size:,} bytes behind the file")
        return data + offset

    def _check_overlaps(self, tensors: tuple[TensorInfo, ...]) -> None:
        if len({tensor.name for tensor in tensors}) < len(tensors):
            names = sorted(tensor.name for tensor in tensors)
            twice = next(name for name, following in itertools.pairwise(names) if name == following)
            raise self._damaged(f"the tensor {twice} is there twice")
        ordered = sorted(tensors, key=lambda tensor: tensor.offset)
        for tensor, following in itertools.pairwise(ordered):
            if tensor.offset + tensor.num_bytes > following.offset:
                raise self._damaged(f"the tensors {tensor.name} and {following.name} overlap")

    def _string(self, what: str, limit: int) -> str:
        (length,) = self._unpack("Q", what)
        if length > limit:
            raise self._damaged(f"{what} has {length:,} bytes, more than the {limit:,} that are read")
        try:
            return self._take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            raise self._damaged(f"{what} is no text in UTF-8") from None

    def _count(self, what: str, limit: int) -> int:
        (count,) = self._unpack("Q", f"the number of {what}")
        if count > limit:
            raise self._damaged(f"it has {count:,} {what}, more than the {limit:,} that are read")
        return int(count)

    def _unpack(self, form: str, what: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{form}", self._take(struct.calcsize(f"<{form}"), what))

    def _take(self, length: int, what: str) -> bytes:
        self._check_left(length, what)
        taken = self.file.read(length)
        if len(taken) < length:  # the file became shorter
            raise self._damaged(f"it ends within {what}")
        self.at += length
        return taken

    def _check_left(self, length: int, what: str) -> None:
        if self.at + length > self.size:
            raise self._damaged(f"it ends within {what}")
        if self.at + length > MAX_HEADER_BYTES:
            raise self._damaged(f"its header has more than {MAX_HEADER_BYTES >> 20} MiB")

    def _damaged(self, reason: str, hint: str = " Is the download complete?") -> UserError:
        shown = "".join(each if each.isprintable() else "?" for each in reason[:500])  # names are the file's
        return UserError(f"{self.path} is not a GGUF file that can be read: {shown}.{hint}")
