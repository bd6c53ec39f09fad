"""Times on a grid of sizes, and what lies between: linear in the logarithms. No numpy, so that any process can ask."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STEPS = 40
"""A table holds round(STEPS * log2(microseconds)): 1.7% a step."""


@dataclass(frozen=True, slots=True)
class Grid:
    """`axes`: ascending sizes by name; `codes`: a time for every combination, the last axis fastest."""

    names: tuple[str, ...]
    axes: tuple[tuple[int, ...], ...]
    codes: tuple[int, ...]

    @staticmethod
    def of_json(table: Mapping[str, Any]) -> Grid:
        axes = tuple(tuple(axis) for axis in table["axes"].values())
        codes = tuple(int(code) for code in table["codes"])
        if len(codes) != math.prod(map(len, axes)):
            raise ValueError(f"{len(codes)} times for {' x '.join(str(len(axis)) for axis in axes)} sizes")
        return Grid(tuple(table["axes"]), axes, codes)

    def seconds(self, *sizes: float) -> float:
        """At these sizes, one for each axis. Beyond the end of an axis times grow in proportion; before its start they
        stay, because a launch takes its time however little there is to do."""
        places = [_place(axis, size) for axis, size in zip(self.axes, sizes, strict=True)]
        log = 0.0
        for corner in itertools.product((0, 1), repeat=len(places)):
            weight, index = 1.0, 0
            for (low, share), high, axis in zip(places, corner, self.axes, strict=True):
                weight *= share if high else 1.0 - share
                index = index * len(axis) + min(low + high, len(axis) - 1)
            if weight:
                log += weight * self.codes[index]
        beyond = math.prod(max(1.0, size / axis[-1]) for axis, size in zip(self.axes, sizes, strict=True))
        return math.pow(2.0, log / STEPS) * 1e-6 * beyond

    def holds(self, *sizes: float) -> bool:
        """Whether a time of exactly these sizes is in the table."""
        return all(size in axis for axis, size in zip(self.axes, sizes, strict=True))


def _place(axis: Sequence[int], size: float) -> tuple[int, float]:
    """(index of the entry below, share of the way to the next one)."""
    if size <= axis[0] or size >= axis[-1]:
        return (0 if size <= axis[0] else len(axis) - 1), 0.0
    low = bisect.bisect_right(axis, size) - 1
    return low, math.log(size / axis[low]) / math.log(axis[low + 1] / axis[low])


def code_of(microseconds: float) -> int:
    return round(STEPS * math.log2(microseconds))
