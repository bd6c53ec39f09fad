"""Limits the nesting of JSON that clients send, and reads JSON within it.

Code that walks such a value (templates, grammars, encoders) recurses a few times a level. The limit is far below
Python's of 1,000 calls, so that none of it has to expect a RecursionError.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

MAX_JSON_NESTING = 128
"""Nesting depth of objects and arrays. Schemas of tools rarely exceed 30."""
NESTED_TOO_DEEPLY = f"nested more than {MAX_JSON_NESTING} levels deep; make it flatter"

_BLOCK = 1 << 16
"""Bytes processed at a time; intermediate results then fit in a core's cache."""
_LOWER = 0x20
"""The only bit in which `[` and `{` differ; the same holds for `]` and `}`."""


def read_json(text: str) -> Any:
    """Returns the value of JSON text. Raises ValueError, which says what is wrong: not JSON (a lone surrogate is not
    text), or nested too deeply."""
    try:
        raw = text.encode()
        if not nests_too_deeply(raw):
            return msgspec.json.decode(raw)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    raise ValueError(NESTED_TOO_DEEPLY)


def nests_too_deeply(raw: bytes, num_brackets: int | None = None) -> bool:
    """Returns whether JSON exceeds the nesting limit. `num_brackets`: from `count_brackets`, if known. Few brackets
    cannot nest deeply, so most bodies, also those with images, need no second look."""
    if num_brackets is None:
        num_brackets = count_brackets(raw)
    return num_brackets > MAX_JSON_NESTING and _nests_deeper(raw, MAX_JSON_NESTING)


def count_brackets(raw: bytes) -> int:
    """Counts opening brackets, including those within strings. Numpy compares many bytes at once, `bytes.count` one."""
    if len(raw) < _BLOCK // 8:  # too short for numpy to pay off
        return raw.count(b"[") + raw.count(b"{")
    return sum(int(np.count_nonzero(part | _LOWER == ord("{"))) for part in _blocks(raw))


def count_commas(raw: bytes) -> int:
    """Counts commas, including those within strings."""
    return sum(int(np.count_nonzero(part == ord(","))) for part in _blocks(raw))


def has_more_names(raw: bytes, limit: int) -> bool:
    """Returns whether objects of JSON have more than `limit` names together: colons outside of strings. Few bodies have
    so many colons that they need a second look."""
    num_colons = sum(int(np.count_nonzero(part == ord(":"))) for part in _blocks(raw))
    if num_colons <= limit:
        return False
    count = 0
    for colons in _outside_strings(raw, b":"):
        count += len(colons)
        if count > limit:
            return True
    return False


def _blocks(raw: bytes) -> list[np.ndarray]:
    characters = np.frombuffer(raw, np.uint8)
    return [characters[first : first + _BLOCK] for first in range(0, len(raw), _BLOCK)]


def _nests_deeper(raw: bytes, limit: int) -> bool:
    """Returns whether brackets outside of strings nest deeper than `limit`."""
    depth = 0
    for brackets in _outside_strings(raw, b"[]{}"):
        depths = np.cumsum(np.where(brackets | _LOWER == ord("{"), 1, -1), dtype=np.int32)
        if depth + int(depths.max()) > limit:
            return True
        depth += int(depths[-1])
    return False


def _outside_strings(raw: bytes, wanted: bytes) -> Iterator[np.ndarray]:
    """Yields the characters of JSON that are among `wanted` and outside of strings, in parts that are not empty. What
    comes for invalid JSON is arbitrary."""
    unwanted = bytes(set(range(256)) - set(b'"' + wanted))
    if b"\\" in raw:
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # the quotes that are left begin and end strings
    inside_string = False
    for first in range(0, len(raw), _BLOCK):
        if inside_string and raw.find(b'"', first, first + _BLOCK) < 0:  # skips most of an image
            continue
        structure = np.frombuffer(raw[first : first + _BLOCK].translate(None, unwanted), np.uint8)
        if not len(structure):
            continue
        quotes = structure == ord('"')
        inside = np.cumsum(quotes, dtype=np.uint8) + np.uint8(inside_string) & 1 == 1
        inside_string = bool(inside[-1])
        outside = structure[~(inside | quotes)]
        if len(outside):
            yield outside
