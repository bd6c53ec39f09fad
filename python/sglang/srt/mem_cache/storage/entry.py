"""Format of an entry in a store: a header, and pages of main memory one after the other.

8 bytes    MAGIC, which names the version of the format
65 bytes   the entry's name, so that a file under another's name is noticed
8 bytes    length of the rest, little-endian
16 bytes   digest of name, length and the rest: the beginning of HMAC-SHA-256 where the store has a key, as others may
           write there; otherwise CRC-32, little-endian, and zeros
"""

from __future__ import annotations

import hmac
import zlib

MAGIC = b"SM120KV2"
NAME_BYTES = 65
_LENGTH_AT = len(MAGIC) + NAME_BYTES
_DIGEST_AT = _LENGTH_AT + 8
_DIGEST_BYTES = 16
HEADER_BYTES = _DIGEST_AT + _DIGEST_BYTES


def new_entry(size: int) -> bytearray:
    """Returns room for an entry with `size` bytes of content, which begins at HEADER_BYTES."""
    return bytearray(HEADER_BYTES + size)


def seal(name: str, entry: bytearray, key: bytes = b"") -> None:
    """Writes the header of an entry whose content is in place."""
    entry[: len(MAGIC)] = MAGIC
    entry[len(MAGIC) : _LENGTH_AT] = name.encode("ascii")
    entry[_LENGTH_AT:_DIGEST_AT] = (len(entry) - HEADER_BYTES).to_bytes(8, "little")
    entry[_DIGEST_AT:HEADER_BYTES] = _digest(entry, key)


def problem(name: str, entry: bytearray, size: int, key: bytes = b"") -> str | None:
    """Returns what is wrong with an entry that should have this name and `size` bytes of content; None if it is
    valid."""
    if entry[: len(MAGIC)] != MAGIC:
        return "is no entry of this version"
    if len(entry) != HEADER_BYTES + size or int.from_bytes(entry[_LENGTH_AT:_DIGEST_AT], "little") != size:
        return f"has {len(entry):,} bytes instead of {HEADER_BYTES + size:,}"
    if entry[len(MAGIC) : _LENGTH_AT] != name.encode("ascii"):
        return "is an entry of another name"
    if not hmac.compare_digest(entry[_DIGEST_AT:HEADER_BYTES], _digest(entry, key)):
        return "has a wrong digest"
    return None


def _digest(entry: bytearray, key: bytes) -> bytes:
    view = memoryview(entry)
    head, content = view[len(MAGIC) : _DIGEST_AT], view[HEADER_BYTES:]
    if not key:
        return zlib.crc32(content, zlib.crc32(head)).to_bytes(_DIGEST_BYTES, "little")
    keyed = hmac.new(key, head, "sha256")
    keyed.update(content)
    return keyed.digest()[:_DIGEST_BYTES]
