"""How deeply JSON that clients send may be nested, and reading it within that.

What walks such a value (templates, grammars, encoders) calls itself a few times a level. The limit is far from Python's
of 1,000 calls, so that none of them has to expect a RecursionError.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

MAX_JSON_NESTING = 128
"""Objects and arrays inside of each other. Schemas of tools rarely pass 30."""
NESTED_TOO_DEEPLY = f"nested more than {MAX_JSON_NESTING} levels deep; make it flatter"

_BLOCK = 1 << 16
"""Bytes at a time: what is derived from them stays in a core's cache."""
_NO_STRUCTURE = bytes(set(range(256)) - set(b'"[]{}'))
_LOWER = 0x20
"""`[` and `{` differ in this bit alone, and so do `]` and `}`."""


def read_json(text: str) -> Any:
    """The value of JSON that was a string in a request. Raises ValueError, which says what the text is: not JSON (half
    of a surrogate pair is no text), or nested too deeply."""
    try:
        raw = text.encode()
        if not nests_too_deeply(raw):
            return msgspec.json.decode(raw)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    raise ValueError(NESTED_TOO_DEEPLY)


def nests_too_deeply(raw: bytes, num_brackets: int | None = None) -> bool:
    """Whether this JSON nests more than is allowed. `num_brackets`: by `count_brackets`, where it is known already. Few
    brackets cannot nest deeply: most bodies, those with images among them, are not looked at twice."""
    if num_brackets is None:
        num_brackets = count_brackets(raw)
    return num_brackets > MAX_JSON_NESTING and _nests_deeper(raw, MAX_JSON_NESTING)


def count_brackets(raw: bytes) -> int:
    """Opening brackets, those within strings included. Numpy compares many bytes at once, `bytes.count` one."""
    if len(raw) < _BLOCK // 8:  # too little for numpy's calls to pay
        return raw.count(b"[") + raw.count(b"{")
    return sum(int(np.count_nonzero(part | _LOWER == ord("{"))) for part in _blocks(raw))


def count_commas(raw: bytes) -> int:
    """Commas, those within strings included."""
    return sum(int(np.count_nonzero(part == ord(","))) for part in _blocks(raw))


def _blocks(raw: bytes) -> list[np.ndarray]:
    characters = np.frombuffer(raw, np.uint8)
    return [characters[first : first + _BLOCK] for first in range(0, len(raw), _BLOCK)]


def _nests_deeper(raw: bytes, limit: int) -> bool:
    """Brackets within strings do not count. What is no JSON gets either answer."""
    if b"\\" in raw:
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # the quotes that are left begin and end strings
    depth, inside_string = 0, False
    for first in range(0, len(raw), _BLOCK):
        if inside_string and raw.find(b'"', first, first + _BLOCK) < 0:  # most of an image
            continue
        structure = np.frombuffer(raw[first : first + _BLOCK].translate(None, _NO_STRUCTURE), np.uint8)
        if not len(structure):
            continue
        quotes = structure == ord('"')
        inside = np.cumsum(quotes, dtype=np.uint8) + np.uint8(inside_string) & 1 == 1
        inside_string = bool(inside[-1])
        brackets = structure[~(inside | quotes)] | _LOWER
        if not len(brackets):
            continue
        depths = np.cumsum(np.where(brackets == ord("{"), 1, -1), dtype=np.int32)
        if depth + int(depths.max()) > limit:
            return True
        depth += int(depths[-1])
    return False
