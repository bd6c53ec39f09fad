"""Chooses the tiles that the cost model considers best, and a small set of tiles that does nearly as well. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.kernels.ledger_file import tile_key
from sglang.srt.kernels.spec import TileRecord
from sglang.srt.layers.moe.fused_moe_triton.config_format import TilePair
from sglang.srt.layers.moe.fused_moe_triton.tiles import GroupedTile
from sglang.tuning.cost_model import Constants, estimate
from sglang.tuning.search_space import KINDS, MoeShape, grouped_product

Kept = Sequence[tuple[GroupedTile, TileRecord]]
"""Tiles that fit, with what they cost."""
Palette = frozenset[tuple[str, str]]
"""(kind, tile key) of the tiles that may be chosen."""


@dataclass(frozen=True, slots=True)
class Point:
    """A shape with a number of tokens on a GPU, and each tile's predicted seconds by (kind, BLOCK_M), then key."""

    shape: MoeShape
    num_tokens: int
    arch: ArchTraits
    times: Mapping[tuple[str, int], dict[str, float]]

    def best(self, palette: Palette | None = None) -> tuple[float, tuple[str, str]]:
        """Returns the seconds of both products with the best tiles of `palette` (all if None), and the tiles' keys; inf
        if none fits."""
        candidates = [self._best_with(m, palette) for m in sorted({m for _, m in self.times})]
        return min(candidates, default=(math.inf, ("", "")))

    def _best_with(self, block_m: int, palette: Palette | None) -> tuple[float, tuple[str, str]]:
        total, best = 0.0, []
        for kind in KINDS:
            times = self.times.get((kind, block_m), {})
            keys = times if palette is None else [key for k, key in palette if k == kind and key in times]
            seconds, key = min(((times[key], key) for key in keys), default=(math.inf, ""))
            total += seconds
            best.append(key)
        return total, (best[0], best[1])


def predict(
    shape: MoeShape,
    kind: str,
    tile: GroupedTile,
    record: TileRecord,
    num_tokens: int,
    arch: ArchTraits,
    constants: Constants | None = None,
) -> float:
    """Returns the seconds of one product; inf if no program fits an SM."""
    time = estimate(grouped_product(shape, kind, record), num_tokens, tile, record, arch, constants)
    return time.total if time is not None else math.inf


def point(
    shape: MoeShape,
    num_tokens: int,
    arch: ArchTraits,
    kept: Mapping[str, Kept],
    constants: Constants | None = None,
) -> Point:
    """Predicts the times of the tiles in `kept`, by kind."""
    times: dict[tuple[str, int], dict[str, float]] = {}
    for kind in KINDS:
        for tile, record in kept[kind]:
            seconds = predict(shape, kind, tile, record, num_tokens, arch, constants)
            times.setdefault((kind, tile["BLOCK_M"]), {})[tile_key(tile)] = seconds
    return Point(shape, num_tokens, arch, times)


def best_pair(point: Point, kept: Mapping[str, Kept], palette: Palette | None = None) -> TilePair:
    """Returns the tiles of `point.best`."""
    _, keys = point.best(palette)
    by_key = [{tile_key(tile): tile for tile, _ in kept[kind]} for kind in KINDS]
    return TilePair(by_key[0][keys[0]], by_key[1][keys[1]])


def small_palette(points: Iterable[Point], maximum: int, tolerance: float = 0.001) -> Palette:
    """Returns at most `maximum` tiles (an even number or one less) that together serve the points nearly as well as all
    of them.

    Greedy: the tile, or the pair of tiles of one BLOCK_M, that lowers the mean loss most; until it is below
    `tolerance`. Every tile of a palette is one more to compile and to verify.
    """
    points = list(points)
    ideal = [p.best()[0] for p in points]
    chosen: Palette = frozenset()
    while len(chosen) < maximum:
        loss, addition = min(
            ((_loss(points, ideal, chosen | extra), sorted(extra)) for extra in _additions(points, chosen, maximum)),
            default=(math.inf, []),
        )
        if not addition or (chosen and loss >= _loss(points, ideal, chosen) - 1e-6):
            break
        chosen |= frozenset(addition)
        if loss < tolerance:
            break
    return chosen


def _additions(points: Sequence[Point], chosen: Palette, maximum: int) -> set[Palette]:
    """Returns the tiles that may be added: the best ones of some point, alone or in pairs."""
    room = maximum - len(chosen)
    palettes: set[Palette] = set()
    for p in points:
        for block_m in {m for _, m in p.times}:
            seconds, keys = p._best_with(block_m, None)
            if seconds == math.inf:
                continue
            pair = frozenset(zip(KINDS, keys, strict=True)) - chosen
            palettes |= {frozenset({one}) for one in pair}
            if len(pair) <= room:
                palettes.add(pair)
    return {extra for extra in palettes if extra}


def _loss(points: Sequence[Point], ideal: Sequence[float], palette: Palette) -> float:
    """Returns the mean logarithm of the time over the best possible; a point that no tile serves counts as ten times
    slower."""
    ratios = (min(10.0, p.best(palette)[0] / best) for p, best in zip(points, ideal, strict=True))
    return math.fsum(math.log(ratio) for ratio in ratios) / max(1, len(points))
