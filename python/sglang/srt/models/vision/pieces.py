"""The pieces of an encoder step, which can stop behind each: what `VisionEncoder.encoding` computes up to a yield.

A part of a step begins with the embedding of its patches and ends with the merging to tokens. Between them are the
layers: queries, keys and values; attention; and the rest. Each of the three may be cut by patches. Attention is
quadratic in the patches of a clip, so that for a large image it is most of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sglang.srt.models.vision.patch_places import Grid, clips, num_patches, parts_of_clips
from sglang.srt.plan.media import PATCHES_A_STEP
from sglang.srt.plan.towers.tower import Tower


@dataclass(frozen=True, slots=True)
class Cuts:
    """In how many shares of patches each layer is computed: its attention where it has no windows (`queries`), and what
    every patch has alone (`rows`)."""

    queries: int = 1
    rows: int = 1


WHOLE_LAYERS = Cuts()


@dataclass(frozen=True, slots=True)
class PatchChunk:
    """The work of a piece: `share` of the products of a layer over so many `patches`, and the `pairs` of patches that
    see one another."""

    share: float
    patches: int
    pairs: float


def parts_of(tower: Tower, grids: Sequence[Grid]) -> list[list[Grid]]:
    """Returns the clips of all items in order, by the parts in which they are computed: clips see themselves alone, so
    a long video has several, and no more of its pixels than those of two need be on the device."""
    return list(parts_of_clips(clips(grids, tower.clip_frames), PATCHES_A_STEP))


def pairs_of(tower: Tower, part: Sequence[Grid]) -> float:
    """Returns the pairs of patches that see one another in a layer in which those of a clip do. Where most layers have
    windows, times are those of the mean layer, and a layer without them has so many more pairs than it."""
    without_window = sum(map(tower.sees_whole_clips, range(tower.num_layers)))
    return sum(num_patches([clip]) ** 2 for clip in part) * tower.num_layers / max(without_window, 1)


def shares(count: int, number: int) -> Iterator[slice]:
    """Yields so many slices that are `count` patches together."""
    for i in range(number):
        yield slice(count * i // number, count * (i + 1) // number)


def pieces_of(tower: Tower, part: Sequence[Grid], cuts: Cuts) -> Iterator[PatchChunk]:
    """Yields the pieces of a part in order."""
    patches, pairs = num_patches(part), pairs_of(tower, part)
    yield PatchChunk(0.5, patches, 0.0)
    half = [PatchChunk(0.5 / cuts.rows, patches, 0.0)] * cuts.rows
    for layer in range(tower.num_layers):
        yield from half
        whole = tower.sees_whole_clips(layer)
        yield from (
            [PatchChunk(0.0, patches, pairs / cuts.queries)] * cuts.queries
            if whole
            else [PatchChunk(0.0, patches, 0.0)]
        )
        yield from half
    yield PatchChunk(0.5, patches, 0.0)
