"""The positions of image and video patches, in the order in which processors give them: row by row, or with the patches
of one token together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

Grid = tuple[int, int, int]
"""Frames, rows and columns of patches."""
ROW_BY_ROW = 1
"""The merge value of patches that come in the order of an image's pixels."""


def rows_and_columns(grids: Sequence[Grid], merge: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the row and the column [P] int64 of every patch within its frame. With a `merge` of 1 patches come row by
    row."""
    rows, columns = [], []
    for frames, height, width in grids:
        shape = (height // merge, width // merge, merge, merge)
        row = np.arange(height).reshape(height // merge, 1, merge, 1)
        column = np.arange(width).reshape(1, width // merge, 1, merge)
        rows.append(np.tile(np.broadcast_to(row, shape).ravel(), frames))
        columns.append(np.tile(np.broadcast_to(column, shape).ravel(), frames))
    return np.concatenate(rows), np.concatenate(columns)


def frame_starts(grids: Sequence[Grid]) -> np.ndarray:
    """Returns the first patch of every frame, and P at the end: [frames + 1] int32."""
    sizes = np.concatenate([np.full(frames, height * width) for frames, height, width in grids])
    return np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)


def longest_frame(grids: Sequence[Grid]) -> int:
    """Returns the patches of the largest frame."""
    return max(rows * columns for _, rows, columns in grids)


def clip_starts(grids: Sequence[Grid]) -> np.ndarray:
    """Returns the first patch of every grid, and P at the end: [grids + 1] int32."""
    sizes = [frames * rows * columns for frames, rows, columns in grids]
    return np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)


def frame_numbers(grids: Sequence[Grid]) -> np.ndarray:
    """Returns the number [P] int64 of every patch's frame within its grid, from 1 on; 0 in grids of one frame."""
    of_several = np.concatenate([np.full(num_patches([grid]), grid[0] > 1) for grid in grids])
    return frame_indices(grids) + of_several


def frame_indices(grids: Sequence[Grid]) -> np.ndarray:
    """Returns the index [P] int64 of every patch's frame within its grid."""
    return np.concatenate([np.repeat(np.arange(frames), rows * columns) for frames, rows, columns in grids])


def interpolated(grids: Sequence[Grid], merge: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the four neighbours [P, 4] int64 of every patch in a square table of `side` x `side` positions that is
    stretched over its frame, corner to corner, and their weights [P, 4] float32."""
    places = rows_and_columns(grids, merge)
    neighbours, weights = [], []
    for place, axis in zip(places, (1, 2), strict=True):
        last = np.repeat([grid[axis] - 1 for grid in grids], [frames * h * w for frames, h, w in grids])
        at = place.astype(np.float32) * (np.float32(side - 1) / np.maximum(last, 1).astype(np.float32))
        low = np.minimum(at.astype(np.int64), side - 1)
        share = at - low.astype(np.float32)
        neighbours.append(np.stack((low, np.minimum(low + 1, side - 1)), axis=1))
        weights.append(np.stack((1 - share, share), axis=1))
    return _pairs(neighbours, weights, side)


def bilinear(grids: Sequence[Grid], merge: int, side: int, beyond: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Returns the same as `interpolated` for a table stretched cell center to cell center. Neighbours outside of the
    table are replaced by those at its edge, with weights multiplied by `beyond`."""
    places = rows_and_columns(grids, merge)
    neighbours, weights = [], []
    for place, axis in zip(places, (1, 2), strict=True):
        size = np.repeat([grid[axis] for grid in grids], [frames * h * w for frames, h, w in grids])
        at = (place.astype(np.float32) + np.float32(0.5)) * np.float32(side) / size.astype(np.float32) - np.float32(0.5)
        low = np.floor(at)
        near = low.astype(np.int64)[:, None] + np.arange(2)
        inside = np.where((near >= 0) & (near < side), np.float32(1), np.float32(beyond))
        neighbours.append(np.clip(near, 0, side - 1))
        weights.append(np.stack((1 - (at - low), at - low), axis=1) * inside)
    return _pairs(neighbours, weights, side)


def _pairs(neighbours: Sequence[np.ndarray], weights: Sequence[np.ndarray], side: int) -> tuple[np.ndarray, np.ndarray]:
    """Combines neighbours and weights [P, N] by row and by column into those of the table, [P, N * N]."""
    index = neighbours[0][:, :, None] * side + neighbours[1][:, None, :]
    weight = weights[0][:, :, None] * weights[1][:, None, :]
    return index.reshape(len(index), -1), weight.reshape(len(weight), -1)


def cubic(grids: Sequence[Grid], merge: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the 16 neighbours [P, 16] int64 of every patch in a square table of `side` x `side` positions that is
    stretched over its frame, cell center to cell center, and their weights [P, 16] float32.

    Weights are those of cubic convolution (Keys, 1981) with a = -0.75; neighbours outside of the table are those at
    its edge, as torch's bicubic interpolation has it."""
    places = rows_and_columns(grids, merge)
    neighbours, weights = [], []
    for place, axis in zip(places, (1, 2), strict=True):
        size = np.repeat([grid[axis] for grid in grids], [frames * h * w for frames, h, w in grids])
        at = (place.astype(np.float32) + np.float32(0.5)) * np.float32(side) / size.astype(np.float32) - np.float32(0.5)
        low = np.floor(at)
        steps = np.arange(-1, 3)
        neighbours.append(np.clip(low.astype(np.int64)[:, None] + steps, 0, side - 1))
        weights.append(_keys(np.abs((at - low)[:, None] - steps.astype(np.float32))))
    return _pairs(neighbours, weights, side)


def _keys(distance: np.ndarray, a: float = -0.75) -> np.ndarray:
    """Returns the weight of a neighbour at this distance, 0 to 2."""
    near = (a + 2) * distance**3 - (a + 3) * distance**2 + 1
    far = a * (distance**3 - 5 * distance**2 + 8 * distance - 4)
    return np.where(distance <= 1, near, far).astype(np.float32)


def squares(grids: Sequence[Grid], merge: int) -> np.ndarray:
    """Returns the order [P] int64 that puts the patches of one token together, for patches that come row by row."""
    rows, columns = rows_and_columns(grids, merge)
    widths = np.repeat([width for _, _, width in grids], [frames * h * w for frames, h, w in grids])
    starts = frame_starts(grids)
    firsts = np.repeat(starts[:-1].astype(np.int64), np.diff(starts))
    index: np.ndarray = firsts + rows * widths + columns
    return index


def windows(grids: Sequence[Grid], merge: int, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the squares of the merge [P / merge^2] int64 in the order of windows of `window` x `window` of them, row
    by row within their frame, and the first patch of every window, and P at the end: [windows + 1] int32."""
    order, sizes, first = [], [], 0
    for frames, height, width in grids:
        rows, columns = np.indices((height // merge, width // merge)).reshape(2, -1) // window
        number = rows * -(-(width // merge) // window) + columns
        within = np.argsort(number, kind="stable")
        for _ in range(frames):
            order.append(first + within)
            sizes.append(np.bincount(number) * merge**2)
            first += len(within)
    starts = np.concatenate(([0], np.cumsum(np.concatenate(sizes))))
    return np.concatenate(order), starts.astype(np.int32)


def clips(grids: Sequence[Grid], together: int) -> list[Grid]:
    """Returns all frames in order as grids of at most `together` frames of one item."""
    return [
        (min(together, frames - first), rows, columns)
        for frames, rows, columns in grids
        for first in range(0, frames, together)
    ]


def num_patches(grids: Sequence[Grid]) -> int:
    """Returns the number of patches of all grids."""
    return sum(frames * rows * columns for frames, rows, columns in grids)


def parts_of_clips(grids: Sequence[Grid], limit: int) -> Iterator[list[Grid]]:
    """Yields the grids in order, in runs of at most `limit` patches. A larger grid is a run by itself."""
    run: list[Grid] = []
    size = 0
    for grid in grids:
        patches = num_patches([grid])
        if run and size + patches > limit:
            yield run
            run, size = [], 0
        run.append(grid)
        size += patches
    yield run
