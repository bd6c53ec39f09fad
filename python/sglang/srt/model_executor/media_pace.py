"""How much of an encoder step, and of a prompt with images, is computed between two tokens of requests that decode.

An encoder's slice of s ms behind a decode step of d ms makes the time between two tokens d + s. The 99th percentile
beside images is to stay within 1.5 times that without, so s is at most SHARE of d, and so is what a prompt adds to a
step, which has one of the two: the rest of the half is left for longer contexts, and for the launches of the host. A
slice is a run of pieces
(`towers.base.pieces`); where a layer takes longer than a slice, it is cut, too. All times are measured at
the start, so that the ranks, which agree on them, cut alike. On a stream of its own the encoder would
cost more: a decode step is some 300 kernels, one behind the other, and each would wait for blocks of the encoder's
products to leave an SM (some 50 us), which is longer than the step.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sglang.srt.plan.media import PATCH_LAYERS_BESIDE
from sglang.srt.towers.base.patch_places import Grid, num_patches
from sglang.srt.towers.base.pieces import WHOLE_LAYERS, Cuts, PatchChunk, pairs_of, parts_of, pieces_of
from sglang.srt.towers.base.spec import Tower

SHARE = 0.3
"""Share of a decode step that a slice of an encoder step, or a part of a prompt, may add to it."""
MAX_CUTS = 128
"""Most shares into which a layer is cut."""
MIN_TOKENS = 64
"""Fewest tokens of a prompt with images that a step computes, however long that takes."""
FLAT = 1.1
"""Prompt steps up to this factor longer than the shortest one are bound by launches; fewer tokens would not make them
shorter."""


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Milliseconds of the encoder's mean layer: `patch` per patch, `pair` per pair of patches in attention, and at
    least `least`, which the launches take."""

    patch: float
    pair: float
    least: float

    @classmethod
    def fitted(cls, small: tuple[int, int, float], large: tuple[int, int, float], minimum: float) -> LayerTimes:
        """Fits the times to two measurements. small, large: clips, patches of each clip, and milliseconds of a
        layer."""
        (_, seen, _), (_, more_seen, _) = small, large
        each, of_large = (ms / (count * patches) for count, patches, ms in (small, large))
        pair = max(0.0, (of_large - each) / (more_seen - seen))
        return cls(max(each - pair * seen, 0.0), pair, minimum)

    def time_chunk(self, piece: PatchChunk) -> float:
        """Returns the milliseconds of a piece."""
        return max(piece.share * self.least, piece.share * piece.patches * self.patch + piece.pairs * self.pair)


_UNMEASURED = LayerTimes(1.0, 0.0, 0.0)
"""In patches times layers."""


@dataclass(frozen=True, slots=True)
class Slices:
    """An encoder step in slices: the number of `pieces` in each, and how layers are cut into pieces."""

    pieces: tuple[int, ...]
    cuts: Cuts = WHOLE_LAYERS


WHOLE = Slices((1,))
"""A step in one slice, which runs to the end, however many pieces there are."""


@dataclass(frozen=True, slots=True)
class MediaPace:
    """Limits of encoder slices and prompts beside decoding requests. `decode_ms`: requests -> milliseconds of a decode
    step. `prompt_ms`: tokens -> milliseconds of a step with a prompt, in graphs of these sizes (`in_graphs`) or
    launched kernel by kernel. Without a measurement there is no limit, and slices have a constant size."""

    layer: LayerTimes | None = None
    decode_ms: Mapping[int, float] = field(default_factory=dict)
    prompt_ms: Mapping[int, float] = field(default_factory=dict)
    in_graphs: bool = False

    def slices(self, tower: Tower, grids: Sequence[Grid], num_decodes: int) -> Slices:
        """Returns the slices of an encoder step beside `num_decodes` decoding requests: none exceeds its share of a
        decode step, unless a single piece does."""
        parts = parts_of(tower, grids)
        if self.layer is None or not self.decode_ms:
            layer, limit, cuts = _UNMEASURED, float(PATCH_LAYERS_BESIDE), WHOLE_LAYERS
        else:
            layer, limit = self.layer, SHARE * self._decode_ms(num_decodes)
            attention = layer.pair * max(pairs_of(tower, part) for part in parts)
            products = layer.patch * max(map(num_patches, parts)) / 2
            cuts = Cuts(_cuts(attention, limit / 2), _cuts(products, limit))
        times = [layer.time_chunk(piece) for part in parts for piece in pieces_of(tower, part, cuts)]
        return Slices(tuple(_packed(times, limit)), cuts)

    def prompt_tokens(self, num_decodes: int) -> int | None:
        """Returns how many tokens of prompts with images a step computes beside `num_decodes` decoding requests; None:
        no limit."""
        if not self.prompt_ms or not self.decode_ms:
            return None
        limit = (1 + SHARE) * self._decode_ms(num_decodes)
        if self.in_graphs:
            return self._graph_tokens(num_decodes, limit)
        longest = max(limit, FLAT * min(self.prompt_ms.values()))
        return max(MIN_TOKENS, _crossing(self.prompt_ms, longest) - num_decodes)

    def _graph_tokens(self, num_decodes: int, limit: float) -> int:
        """Returns the tokens that fill the largest graph within the limit, or the next larger one if that has too few.
        A step takes the time of its graph even if its tokens do not fill it."""
        minimum = num_decodes + MIN_TOKENS
        sizes = [size for size in sorted(self.prompt_ms) if size >= minimum]
        fitting = [size for size in sizes if self.prompt_ms[size] <= limit]
        return (fitting[-1] if fitting else sizes[0] if sizes else minimum) - num_decodes

    def _decode_ms(self, num_decodes: int) -> float:
        sizes = sorted(self.decode_ms)
        return self.decode_ms[sizes[min(bisect_left(sizes, num_decodes), len(sizes) - 1)]]

    def describe(self) -> str:
        """Describes the limits beside the most measured requests, for the log."""
        if self.layer is None or not self.decode_ms:
            return f"slices of {PATCH_LAYERS_BESIDE} patches x layers"
        maximum = max(self.decode_ms)
        tokens = self.prompt_tokens(maximum)
        return (
            f"slices of {SHARE * self._decode_ms(maximum):.2f} ms and {'all' if tokens is None else tokens} tokens of"
            f" prompts with images beside {maximum} requests, whose step takes {self._decode_ms(maximum):.2f} ms"
        )


def _cuts(milliseconds: float, limit: float) -> int:
    return min(max(1, math.ceil(milliseconds / limit)), MAX_CUTS)


def _packed(times: Sequence[float], limit: float) -> Iterator[int]:
    """Yields the number of pieces, in order, of each slice of at most `limit`; a longer piece is a slice by itself."""
    count, total = 0, 0.0
    for time in times:
        if count and time and total + time > limit:
            yield count
            count, total = 0, 0.0
        count, total = count + 1, total + time
    yield count


def _crossing(times: Mapping[int, float], limit: float) -> int:
    """Returns the largest size whose time is within the limit, interpolated linearly between measurements."""
    sizes = sorted(times)
    fitting = [size for size in sizes if times[size] <= limit]
    low = max(fitting, default=sizes[0])
    above = [size for size in sizes if size > low]
    if not above or times[low] > limit:
        return low
    high = above[0]
    return low + int((high - low) * (limit - times[low]) / (times[high] - times[low]))


MANY_TILES = 8
Milliseconds = Callable[[Sequence[Grid]], float]


def measured_layer(milliseconds: Milliseconds, merge: int, num_layers: int, tile_side: int | None = None) -> LayerTimes:
    """Measures the layer times. milliseconds(grids): device time of a whole encoder step, after a first call that
    compiles. tile_side: of the tower; the time of attention is then included in the time per patch."""
    if tile_side is not None:
        one, many = (milliseconds([(count, tile_side, tile_side)]) / num_layers for count in (1, MANY_TILES))
        return LayerTimes(many / (MANY_TILES * tile_side**2), 0.0, one)
    tiny, side, large_side = merge * 4, 32 // merge * merge, 64 // merge * merge
    count = (large_side // side) ** 2
    small, large = [(1, side, side)] * count, [(1, large_side, large_side)]
    minimum, of_small, of_large = (milliseconds(grids) / num_layers for grids in ([(1, tiny, tiny)], small, large))
    return LayerTimes.fitted((count, side**2, of_small), (1, large_side**2, of_large), minimum)
