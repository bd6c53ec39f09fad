"""The tiles of a launch, by the tokens of its step: one schema for attention, linear layers and experts.

`plan.make_plan` cuts the bands of every op once; layers ask the plan for theirs when they are built, and look up the
band of a step when they launch.

    bands = plan.tiles("linear/fp8_block", (4096, 7168, False))
    band = band_of(bands, num_tokens)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from sglang.srt.kernels.ledger_file import tile_key
from sglang.srt.kernels.spec import Tile

Tiles = tuple[Tile, ...]
"""The tiles of products that are launched together: one, or gate_up's and down's of experts."""

ANY = float("inf")


def tiles_key(tiles: Tiles) -> str:
    """The tiles as logs, `explain` and remembered failures name them."""
    return " / ".join(map(tile_key, tiles))


@dataclass(frozen=True)
class Band:
    """The tiles that steps of up to `most` tokens launch.

    `way` names the one of the kernel's ways that computes them. `rungs` begin with the tiles that are launched; those
    behind them are what a launch may step down to, in order. A way that takes no tile has none. `why` says where the
    tiles come from.
    """

    most: float
    way: str
    rungs: tuple[Tiles, ...] = ()
    why: str = ""

    @property
    def tiles(self) -> Tiles:
        return self.rungs[0]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the rungs. Bands with equal ones are launched alike."""
        return tuple(map(tiles_key, self.rungs))

    def describe(self) -> str:
        """The tiles in words, as "tiles M16 N32 K256 w4 s4"."""
        return " ".join([self.way, *self.names[:1]])


Bands = tuple[Band, ...]
"""The bands of an op by `most`, the smallest first."""


def band_of(bands: Bands, tokens: int) -> Band:
    """The first band that reaches so far, or the last one."""
    return next((band for band in bands if tokens <= band.most), bands[-1])


def most_tokens(holds: Callable[[int], bool]) -> float:
    """The most tokens for which `holds` is true, which it is for all fewer ones; 0: for none; ANY: for all."""
    if not holds(1):
        return 0
    if holds(MOST):
        return ANY
    low, high = 1, MOST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def joined(bands: Iterable[Band]) -> Bands:
    """Neighbours that are launched alike as one."""
    kept: list[Band] = []
    for band in bands:
        if kept and (kept[-1].way, kept[-1].names) == (band.way, band.names):
            kept[-1] = replace(kept[-1], most=band.most)
        else:
            kept.append(band)
    return tuple(kept)


MOST = 1 << 40
"""More tokens than any step has."""


def _describe(bands: Bands) -> str:
    bands = joined(bands)
    parts = [f"to {int(band.most):,} tokens {band.describe()}" for band in bands if band.most < ANY]
    return "; ".join([*parts, f"{'beyond ' if parts else ''}{bands[-1].describe()}"])


Shape = tuple[int, int, bool]
"""The shape of a weight, as in Need.shapes: rows, columns, whether there is a bias."""


@dataclass(frozen=True, slots=True)
class OpBands:
    """The bands of one op. Linear layers have some for each shape of a weight, other ops the same ones for all (None).
    `source` says where they come from, if that is worth a line; `warnings` what was passed over for them."""

    by_shape: Mapping[Shape | None, Bands] = field(default_factory=dict)
    source: str = ""
    warnings: tuple[str, ...] = ()

    def describe(self) -> list[str]:
        """One line for all shapes with equal bands, such as "4096x4096: to 2 tokens few rows N2 ...; beyond tiles"."""
        shapes: dict[str, list[str]] = {}
        for shape, bands in self.by_shape.items():
            named = shapes.setdefault(_describe(bands), [])
            name = "" if shape is None else f"{shape[0]}x{shape[1]}"
            named += [name] if name and name not in named else []
        return [f"{', '.join(names)}{': ' if names else ''}{bands}" for bands, names in shapes.items()]

    def to_json(self) -> list[dict[str, Any]]:
        """`most` None: however many tokens; rungs as `tiles_key` names them."""
        return [
            {
                "shape": shape and list(shape[:2]),
                "most": None if band.most == ANY else int(band.most),
                "way": band.way,
                "rungs": list(band.names),
                "why": band.why,
            }
            for shape, bands in self.by_shape.items()
            for band in bands
        ]
