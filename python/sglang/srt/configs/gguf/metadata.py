"""Typed values of a GGUF file's metadata; errors name the key and the file. No torch."""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from sglang.srt.errors import UserError

T = TypeVar("T")


class Metadata:
    """The metadata of a model of architecture `arch`. Records which keys of the architecture were read: one that nobody
    read may change answers."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values, self.path = values, path
        self.arch = self.general("general.architecture", str)
        self._read: set[str] = set()

    def general(self, key: str, kind: type[T], default: T | None = None) -> T:
        """Returns the value of a whole key; without `default` it is required. Raises UserError."""
        value = self.values.get(key, default)
        if value is None:
            raise UserError(f"{self.path}: the key {key!r} is missing.")
        if type(value) is not kind:
            raise UserError(f"{self.path}: {key!r} must be of type {kind.__name__}; got {str(value)[:80]!r}.")
        return value

    def has(self, key: str) -> bool:
        """Returns whether the architecture's key is there. It then counts as read."""
        self._read.add(key)
        return f"{self.arch}.{key}" in self.values

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """Returns the value of the architecture's key, as `general` does."""
        self._read.add(key)
        return self.general(f"{self.arch}.{key}", kind, default)

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a number that the file has in fp32, as the shortest decimal fraction that is it: 1e-05 instead of
        9.99999974e-06. Raises UserError for NaN and infinity."""
        return self._shortest(f"{self.arch}.{key}", self.get(key, float, default))

    def general_number(self, key: str) -> float | None:
        """Returns the number at a whole key as `number` does, None if there is none."""
        return self._shortest(key, self.general(key, float)) if key in self.values else None

    def _shortest(self, key: str, value: float) -> float:
        if not math.isfinite(value):
            raise UserError(f"{self.path}: {key!r} must be a number; got {value}.")
        return shortest(value)

    def count(self, key: str, default: int | None = None) -> int:
        """Returns a whole number; where the file has one for each layer, all must be equal. Raises UserError."""
        value = self.values.get(f"{self.arch}.{key}")
        if not isinstance(value, list):
            return self.get(key, int, default)
        self._read.add(key)
        if len(set(value)) != 1 or type(value[0]) is not int:
            raise UserError(f"{self.path}: {self.arch}.{key} differs by layer, which is not supported.")
        return value[0]

    def positive(self, key: str, default: int | None = None) -> int:
        """Returns a whole number of at least 1, as `count` does."""
        value = self.count(key, default)
        if value < 1:
            raise UserError(f"{self.path}: {self.arch}.{key} must be at least 1; got {value}.")
        return value

    def check_read(self, harmless: Collection[str]) -> None:
        """Raises UserError for a key of the architecture that nobody read and that is not `harmless`."""
        beginning = f"{self.arch}."
        keys = {key.removeprefix(beginning) for key in self.values if key.startswith(beginning)}
        unread = sorted(keys - self._read - set(harmless))
        if unread:
            shown = ", ".join(f"{beginning}{key} = {str(self.values[beginning + key])[:40]}" for key in unread[:5])
            raise UserError(f"{self.path}: {shown}: not supported for {self.arch}, no layer here reads it.")


def shortest(value: float) -> float:
    """Returns the shortest decimal fraction whose fp32 is that of `value`."""
    (single,) = struct.unpack("f", struct.pack("f", value))
    for digits in range(1, 9):
        rounded = float(f"{single:.{digits}g}")
        if struct.unpack("f", struct.pack("f", rounded))[0] == single:
            return rounded
    return float(single)
