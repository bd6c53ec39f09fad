"""The pieces of an encoder step, which can stop behind each: what `VisionEncoder.encoding` computes up to a yield.

A part of a step begins with the embedding of its patches and ends with the merging to tokens. Between them are the
layers: queries, keys and values of all patches; attention, of all queries or of a share of them after the other; and
the rest. Attention is quadratic in the patches of a clip, so that for a large image it is most of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sglang.srt.models.vision.patch_places import Grid, clips, num_patches, parts_of_clips
from sglang.srt.plan.media import PATCHES_A_STEP
from sglang.srt.plan.towers.tower import Tower


@dataclass(frozen=True, slots=True)
class Piece:
    """The work of a piece: `share` of the products of a layer over so many `patches`, and the `pairs` of patches that
    see one another."""

    share: float
    patches: int
    pairs: float


def parts_of(tower: Tower, grids: Sequence[Grid]) -> list[list[Grid]]:
    """Returns the clips of all items in order, by the parts in which they are computed: clips see themselves alone, so
    a long video has several, and no more of its pixels than those of two need be on the device."""
    return list(parts_of_clips(clips(grids, tower.pooled_frames), PATCHES_A_STEP))


def pairs_of(tower: Tower, part: Sequence[Grid]) -> float:
    """Returns the pairs of patches that see one another in a layer in which those of a clip do. Where most layers have
    windows, times are those of the mean layer, and a layer without them has so many more pairs than it."""
    without_window = sum(map(tower.sees_whole_clips, range(tower.num_layers)))
    return sum(num_patches([clip]) ** 2 for clip in part) * tower.num_layers / max(without_window, 1)


def pieces_of(tower: Tower, part: Sequence[Grid], cuts: int) -> Iterator[Piece]:
    """Yields the pieces of a part in order. cuts: shares of the queries of a layer, if it has no windows."""
    patches, pairs = num_patches(part), pairs_of(tower, part)
    half = Piece(0.5, patches, 0.0)
    yield half
    for layer in range(tower.num_layers):
        yield half
        if tower.sees_whole_clips(layer):
            yield from (Piece(0.0, patches, pairs / cuts) for _ in range(cuts))
        else:
            yield Piece(0.0, patches, 0.0)
        yield half
    yield half
