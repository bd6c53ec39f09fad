"""Bytes of an entry in a store: a header, and pages of main memory one after the other.

8 bytes    MAGIC, which names the version of the format
65 bytes   the entry's name, so that a file under another's name is noticed
8 bytes    length of the rest, little-endian
4 bytes    CRC-32 of name, length and the rest, little-endian
"""

from __future__ import annotations

import zlib

MAGIC = b"SM120KV1"
NAME_BYTES = 65
_LENGTH_AT = len(MAGIC) + NAME_BYTES
_CHECKSUM_AT = _LENGTH_AT + 8
HEADER_BYTES = _CHECKSUM_AT + 4


def new_entry(size: int) -> bytearray:
    """Returns room for an entry whose content has `size` bytes; that begins at HEADER_BYTES."""
    return bytearray(HEADER_BYTES + size)


def seal(name: str, entry: bytearray) -> None:
    """Writes the header of an entry whose content is there."""
    entry[: len(MAGIC)] = MAGIC
    entry[len(MAGIC) : _LENGTH_AT] = name.encode("ascii")
    entry[_LENGTH_AT:_CHECKSUM_AT] = (len(entry) - HEADER_BYTES).to_bytes(8, "little")
    entry[_CHECKSUM_AT:HEADER_BYTES] = _checksum(entry).to_bytes(4, "little")


def problem(name: str, entry: bytearray, size: int) -> str | None:
    """Returns what is wrong with an entry that should have the name and `size` bytes of content; None: nothing is."""
    if entry[: len(MAGIC)] != MAGIC:
        return "is no entry of this version"
    if len(entry) != HEADER_BYTES + size or int.from_bytes(entry[_LENGTH_AT:_CHECKSUM_AT], "little") != size:
        return f"has {len(entry):,} bytes instead of {HEADER_BYTES + size:,}"
    if entry[len(MAGIC) : _LENGTH_AT] != name.encode("ascii"):
        return "is an entry of another name"
    if int.from_bytes(entry[_CHECKSUM_AT:HEADER_BYTES], "little") != _checksum(entry):
        return "has a wrong checksum"
    return None


def _checksum(entry: bytearray) -> int:
    view = memoryview(entry)
    return zlib.crc32(view[HEADER_BYTES:], zlib.crc32(view[len(MAGIC) : _CHECKSUM_AT]))
