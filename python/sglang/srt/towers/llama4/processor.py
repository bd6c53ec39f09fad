"""Llama 4's views of a picture: the tiles of a black canvas with the picture on it, then the whole picture as one tile.

Source: `Llama4ImageProcessor` of transformers 5.17, which needs torchvision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from sglang.srt.plan.media import PATCHES_A_STEP
from sglang.srt.towers.pictures.patch_types import as_type
from sglang.srt.towers.pictures.patches import Patches, Settings, cut, given, resized
from sglang.srt.towers.pictures.processor import Processor, Views
from sglang.srt.towers.pictures.video import MediaError

_DEFAULTS: Mapping[str, Any] = {
    "image_mean": (0.5,) * 3,
    "image_std": (0.5,) * 3,
    "rescale_factor": 1 / 255,
    "patch_size": 14,
    "max_patches": 16,
    "resize_to_max_canvas": False,
}
_SIDE = 336
_MERGE, _ROW_BY_ROW = 2, 1

Shape = tuple[int, int]
"""Rows and columns of tiles."""


def canvases(maximum: int) -> list[Shape]:
    """Returns the shapes with at most `maximum` tiles, grouped by aspect ratio, the largest first."""
    by_ratio: dict[float, list[Shape]] = {}
    for count in range(maximum, 0, -1):
        for rows in range(1, count + 1):
            if count % rows == 0:
                by_ratio.setdefault(rows / (count // rows), []).append((rows, count // rows))
    return [shape for shapes in by_ratio.values() for shape in shapes]


def best_canvas(size: tuple[int, int], tile: int, shapes: Sequence[Shape], largest: bool) -> Shape:
    """Returns the canvas on which a picture of this width and height is enlarged least (with `largest`: most). If none
    holds the picture, returns the one that shrinks it least. Among equals the smallest canvas is chosen."""
    width, height = map(np.float32, size)
    sides = np.asarray(shapes, np.float32) * np.float32(tile)
    scales = np.minimum(sides[:, 1] / width, sides[:, 0] / height)
    fitting = scales[scales >= 1]
    chosen = scales.max() if largest or not len(fitting) else fitting.min()
    return min((shape for shape, scale in zip(shapes, scales, strict=True) if scale == chosen), key=math.prod)


def size_on(size: tuple[int, int], tile: int, shape: Shape, largest: bool) -> tuple[int, int]:
    """Returns the width and height of a picture on its canvas. A picture smaller than the canvas is enlarged to at most
    the side of a tile, unless `largest`."""
    width, height = size
    (high, by_rows), (wide, by_columns) = (
        _bounded(side, tile, number * tile, largest) for side, number in zip((height, width), shape, strict=True)
    )
    if by_columns < by_rows:
        high = min(math.floor(height * by_columns), high)
    else:
        wide = min(math.floor(width * by_rows), wide)
    return max(wide, 1), max(high, 1)


def _bounded(side: int, tile: int, canvas: int, largest: bool) -> tuple[int, float | np.float32]:
    """Returns the largest side that a picture may have, and the scale to it; in float32, like the reference class,
    where the canvas is the bound."""
    if largest or canvas < max(side, tile):
        return canvas, np.float32(canvas) / np.float32(side)
    return max(side, tile), max(side, tile) / side


def _levels(settings: Mapping[str, Any]) -> np.ndarray:
    """Returns the normalized value of each level of each channel, [3, 256] float32 rounded to bfloat16 at each step."""
    values = _rounded(np.arange(256, dtype=np.float32)[:, None] * np.float32(settings["rescale_factor"]))
    mean, std = (_rounded(np.asarray(settings[key], np.float32)) for key in ("image_mean", "image_std"))
    return np.ascontiguousarray(_rounded(_rounded(values - mean) / std).T)


def _rounded(values: np.ndarray) -> np.ndarray:
    bits: np.ndarray = as_type(values, "bfloat16").view(np.uint16).astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32)


class CanvasProcessor:
    """Converts pictures to the shape of their canvas and patches in row order [tiles, rows, columns]: first those of
    the tiles, then those of the whole picture, unless one tile is all of it."""

    def __init__(self, settings: Mapping[str, Any], dtype: str) -> None:
        words = {**_DEFAULTS, **given(settings)}
        size = words.get("size")
        height, width = (size.get("height"), size.get("width")) if isinstance(size, Mapping) else (_SIDE, _SIDE)
        self._patch, self._largest = int(words["patch_size"]), bool(words["resize_to_max_canvas"])
        if height != width or not isinstance(height, int) or height % (_MERGE * self._patch):
            raise MediaError(f"tiles of {height} x {width} pixels are no squares of whole tokens")
        self._tile: int = height
        maximum = PATCHES_A_STEP // (height // self._patch) ** 2 - 1
        if maximum < 1:
            raise MediaError(f"tiles of {height} pixels a side have more patches than an encoder step")
        self._shapes, self._levels = canvases(min(int(words["max_patches"]), maximum)), as_type(_levels(words), dtype)

    def __call__(self, image: Image.Image) -> tuple[Shape, Patches]:
        rows, columns = best_canvas(image.size, self._tile, self._shapes, self._largest)
        canvas = np.zeros((rows * self._tile, columns * self._tile, 3), np.uint8)
        size = size_on(image.size, self._tile, (rows, columns), self._largest)
        canvas[: size[1], : size[0]] = resized(image, size, Image.Resampling.BILINEAR)
        tiles = [*canvas.reshape(rows, self._tile, columns, self._tile, 3).swapaxes(1, 2).reshape(-1, *self._square)]
        if len(tiles) > 1:
            tiles.append(resized(image, (self._tile, self._tile), Image.Resampling.BILINEAR))
        pixels = [cut(np.ascontiguousarray(tile), self._levels, self._patch, _ROW_BY_ROW) for tile in tiles]
        side = self._tile // self._patch
        return (rows, columns), Patches(
            np.concatenate(pixels), (len(tiles), side, side), len(tiles) * (side // _MERGE) ** 2
        )

    @property
    def _square(self) -> tuple[int, int, int]:
        return self._tile, self._tile, 3


def _on_a_canvas(settings: Settings, dtype: str) -> Callable[[Image.Image], Views]:
    """Returns the function: each tile has a run; one mark separates the tiles of a row, another follows
    each row, and one precedes the whole picture."""

    process = CanvasProcessor(settings, dtype)

    def see(image: Image.Image) -> Views:
        (rows, columns), patches = process(image)
        tokens = patches.num_tokens // patches.grid[0]
        parts: list[str | int] = ["<|image_start|>"]
        for _ in range(rows if patches.grid[0] > 1 else 0):
            between: list[str | int] = ["<|tile_x_separator|>", tokens]
            parts += [tokens, *between * (columns - 1), "<|tile_y_separator|>"]
        return Views([patches], [*parts, "<|image|>", tokens, "<|image_end|>"])

    return see


PROCESSOR = Processor(views=_on_a_canvas)
