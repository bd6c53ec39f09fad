"""The pieces of an encoder step, between which it can pause: what `VisionEncoder.encoding` computes up to a yield.

A part of a step begins with the embedding of its patches and ends with merging them to tokens. Between these are layers
of three pieces: queries, keys and values; attention; and the rest. Each may be cut by patches. Attention is quadratic
in the patches of a clip, so it dominates a layer for large images.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sglang.srt.plan.media import PATCHES_A_STEP
from sglang.srt.towers.base.patch_places import Grid, clips, num_patches, parts_of_clips
from sglang.srt.towers.base.spec import Tower


@dataclass(frozen=True, slots=True)
class Cuts:
    """The numbers of shares of patches in which a layer is computed: `queries` for attention without windows, `rows`
    for work that each patch does alone."""

    queries: int = 1
    rows: int = 1


WHOLE_LAYERS = Cuts()


@dataclass(frozen=True, slots=True)
class PatchChunk:
    """The work of a piece: `share` of a layer's matrix products over `patches`, and the `pairs` of patches in
    attention."""

    share: float
    patches: int
    pairs: float


def parts_of(tower: Tower, grids: Sequence[Grid]) -> list[list[Grid]]:
    """Returns the clips of all items in order, by the parts in which they are computed. Clips attend only to
    themselves, so a long video has several parts, and at most two parts' pixels are on the device."""
    return list(parts_of_clips(clips(grids, tower.clip_frames), PATCHES_A_STEP))


def pairs_of(tower: Tower, part: Sequence[Grid]) -> float:
    """Returns the pairs of patches in a layer whose attention spans a clip. If most layers have windows, times are
    those of the mean layer, so a layer without a window counts correspondingly more pairs."""
    without_window = sum(map(tower.sees_whole_clips, range(tower.num_layers)))
    return sum(num_patches([clip]) ** 2 for clip in part) * tower.num_layers / max(without_window, 1)


def shares(count: int, number: int) -> Iterator[slice]:
    """Yields `number` slices that together cover `count` patches."""
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
