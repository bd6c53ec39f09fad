"""Times on a grid of sizes, interpolated linearly in the logarithms. No numpy, so that any process can use it."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STEPS = 40
"""A table holds round(STEPS * log2(microseconds)): 1.7% a step."""
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz+-"
"""The alphabet of the two characters of a code, in base 64; a code is at least 0: a microsecond."""
_VALUES = {digit: value for value, digit in enumerate(_DIGITS)}
_TOP = len(_DIGITS) ** 2 - 1
Base = Callable[..., float]
"""Sizes, one for each axis -> seconds that a time goes along with."""


@dataclass(frozen=True, slots=True)
class Grid:
    """`axes`: ascending sizes by name; `codes`: a time for every combination, the last axis fastest."""

    names: tuple[str, ...]
    axes: tuple[tuple[int, ...], ...]
    codes: tuple[int, ...]

    @staticmethod
    def from_json(table: Mapping[str, Any]) -> Grid:
        """Returns the grid of a table. Raises ValueError if the number of times does not fit the axes."""
        axes = tuple(tuple(axis) for axis in table["axes"].values())
        codes = decoded(table["codes"])
        if len(codes) != math.prod(map(len, axes)):
            raise ValueError(f"{len(codes)} times for {' x '.join(str(len(axis)) for axis in axes)} sizes")
        return Grid(tuple(table["axes"]), axes, codes)

    def seconds(self, *sizes: float, base: Base | None = None) -> float:
        """Returns the seconds at the given sizes, one for each axis. With `base`, multiples of it are interpolated, and
        times beyond the axes follow it. Without it, times beyond the end grow in proportion, and those before the start
        are constant, like a launch's."""
        places = [_place(axis, size) for axis, size in zip(self.axes, sizes, strict=True)]
        log = 0.0
        for corner in itertools.product((0, 1), repeat=len(places)):
            weight, index, at = 1.0, 0, []
            for (low, share), high, axis in zip(places, corner, self.axes, strict=True):
                weight *= share if high else 1.0 - share
                entry = min(low + high, len(axis) - 1)
                index = index * len(axis) + entry
                at.append(axis[entry])
            if weight:
                log += weight * (self.codes[index] / STEPS - (math.log2(base(*at) * 1e6) if base else 0.0))
        if base is not None:
            return math.pow(2.0, log) * base(*sizes)
        beyond = math.prod(max(1.0, size / axis[-1]) for axis, size in zip(self.axes, sizes, strict=True))
        return math.pow(2.0, log) * 1e-6 * beyond

    def covers(self, *sizes: float) -> bool:
        """Returns whether the table applies to these sizes: an axis with a single size applies to that size only."""
        return all(len(axis) > 1 or size == axis[0] for axis, size in zip(self.axes, sizes, strict=True))

    def holds(self, *sizes: float) -> bool:
        """Returns whether exactly these sizes are in the table."""
        return all(size in axis for axis, size in zip(self.axes, sizes, strict=True))


def _place(axis: Sequence[int], size: float) -> tuple[int, float]:
    """Returns the index of the entry below, and the share of the way to the next one."""
    if size <= axis[0] or size >= axis[-1]:
        return (0 if size <= axis[0] else len(axis) - 1), 0.0
    low = bisect.bisect_right(axis, size) - 1
    return low, math.log(size / axis[low]) / math.log(axis[low + 1] / axis[low])


def code_of(microseconds: float) -> int:
    """Returns the code of a time, on a logarithmic scale."""
    return min(_TOP, max(0, round(STEPS * math.log2(microseconds))))


def encoded(codes: Sequence[int]) -> str:
    """Returns the codes as text, two characters each."""
    return "".join(_DIGITS[code // 64] + _DIGITS[code % 64] for code in codes)


def decoded(text: str) -> tuple[int, ...]:
    """Returns the codes of a text. Raises ValueError for text that `encoded` does not write."""
    if len(text) % 2 or not set(text) <= _VALUES.keys():
        raise ValueError("codes are pairs of the digits of base 64")
    return tuple(64 * _VALUES[text[i]] + _VALUES[text[i + 1]] for i in range(0, len(text), 2))
