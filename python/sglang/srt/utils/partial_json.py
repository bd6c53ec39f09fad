"""Reads the beginning of a JSON object whose rest is missing or wrong, as in an output that was cut."""

from __future__ import annotations

import json
import re
from typing import Any

from sglang.srt.utils.json_nesting import MAX_JSON_NESTING

_SPACE = re.compile(r"[ \t\r\n]*")
_STRING = re.compile(r'"([^"\\]*(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\]*)*)("?)')
"""A string, perhaps cut; the second group is its closing quote. Each repetition of a group takes a hundred bytes while
it is matched, so there is one for each escape only, not for each character."""
_SCALAR = re.compile(r"(?:-?[0-9]{1,64}(?:\.[0-9]{1,64})?(?:[eE][+-]?[0-9]{1,3})?|true|false|null)(?=[ \t\r\n,}\]])")
"""A number or word with something after it: at the end of a text half of it may be missing."""


class _Broken(Exception):
    """Raised where nothing more can be read."""


def longest_object(text: str) -> dict[str, Any]:
    """Returns the object with which `text` begins, up to the first invalid place; {} if it begins otherwise. A cut
    string keeps its beginning; a cut key, number or word is left out."""
    reader = _Reader(text)
    try:
        if reader.following() == "{":
            value, _ = reader.read_object(1)
            return value
    except _Broken:
        pass
    return {}


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def following(self) -> str:
        """Skips white space. Returns the next character, "" at the end."""
        match = _SPACE.match(self._text, self._at)
        assert match is not None
        self._at = match.end()
        return self._text[self._at : self._at + 1]

    def read_object(self, depth: int) -> tuple[dict[str, Any], bool]:
        """Returns the readable part of an object, and whether it is complete."""
        value: dict[str, Any] = {}
        self._at += 1
        if self._ends("}"):
            return value, True
        while True:
            try:
                key, whole = self._string()
                if not whole or self.following() != ":":
                    return value, False
                self._at += 1
                value[key], whole = self._value(depth)
            except _Broken:
                return value, False
            if not whole:
                return value, False
            if self._ends("}"):
                return value, True
            if not self._ends(","):
                return value, False

    def _array(self, depth: int) -> tuple[list[Any], bool]:
        value: list[Any] = []
        self._at += 1
        if self._ends("]"):
            return value, True
        while True:
            try:
                entry, whole = self._value(depth)
            except _Broken:
                return value, False
            value.append(entry)
            if not whole:
                return value, False
            if self._ends("]"):
                return value, True
            if not self._ends(","):
                return value, False

    def _ends(self, mark: str) -> bool:
        if self.following() != mark:
            return False
        self._at += 1
        return True

    def _value(self, depth: int) -> tuple[Any, bool]:
        following = self.following()
        if following == '"':
            return self._string()
        if following in ("{", "["):
            if depth == MAX_JSON_NESTING:
                raise _Broken
            return self.read_object(depth + 1) if following == "{" else self._array(depth + 1)
        match = _SCALAR.match(self._text, self._at)
        if match is None:
            raise _Broken
        self._at = match.end()
        return json.loads(match[0]), True

    def _string(self) -> tuple[str, bool]:
        self.following()
        match = _STRING.match(self._text, self._at)
        if match is None:
            raise _Broken
        self._at = match.end()
        decoded = str(json.loads(f'"{match[1]}"', strict=False))
        text = decoded.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # half of a pair is no text
        return text, bool(match[2])
