"""Step-3.7's views of a picture: its tiles, if it is large or long, then the whole as a square.

Source: `Step3p7ImageProcessor` of transformers 5.23, which needs torchvision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from sglang.srt.plan.media import PATCHES_A_STEP
from sglang.srt.towers.pictures.patch_types import as_type
from sglang.srt.towers.pictures.patches import CLIP, Patches, Settings, cut, levels_of
from sglang.srt.towers.pictures.processor import Processor, Views
from sglang.srt.towers.pictures.video import MediaError

MAX_TILES = 64
"""Most tiles: a picture of the largest size has 36, one that is far longer than wide has more."""
_DEFAULTS = {**CLIP, "patch_size": 504, "max_image_size": 3024, "vision_patch_size": 14}
_ROW_BY_ROW = 1
_STRIP_SIDE, _STRIP_ASPECT = 32, 4
"""A picture whose shorter side is less than 32 pixels and a quarter of the longer one is put on a black square."""

Size = tuple[int, int]
"""Width and height, in pixels."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """`whole`: the picture's size before it becomes a square. `window`: the side of a tile in the picture resized to
    `cut`; 0: no tiles."""

    whole: Size
    cut: Size
    window: int

    @property
    def columns(self) -> int:
        """Returns the number of columns of tiles; 0 if the picture is not cut."""
        return -(-self.cut[0] // self.window) if self.window else 0

    @property
    def rows(self) -> int:
        """Returns the number of rows of tiles; 0 if the picture is not cut."""
        return -(-self.cut[1] // self.window) if self.window else 0


def tiling(size: Size, square: int, tile: int) -> Tiling:
    """Returns how a picture is cut with squares of `square` and tiles of `tile` pixels a side. Raises MediaError for
    more than MAX_TILES tiles."""
    short, long = min(size), max(size)
    if long <= square:
        window = short if long / short > 1.5 else 0
    else:
        window = min(short, tile) if long / short > _STRIP_ASPECT else tile
    if not window:
        return Tiling(size, size, 0)
    tiles = Tiling(size, (_num_windows(size[0], window), _num_windows(size[1], window)), window)
    if tiles.rows * tiles.columns > MAX_TILES:
        raise MediaError(
            f"a picture of {size[0]} x {size[1]} pixels is seen in {tiles.rows * tiles.columns} tiles; {MAX_TILES} are"
            " the limit"
        )
    return tiles


def _num_windows(side: int, window: int) -> int:
    """Returns a whole number of windows; a remainder of more than a fifth counts as one."""
    return side if side < window else window * (side // window + (side % window > 0.2 * window))


class TiledProcessor:
    """Converts pictures to patches in row order: first those of the tiles [tiles, rows, columns], if any, then those of
    the whole."""

    def __init__(self, settings: Mapping[str, Any], dtype: str) -> None:
        words = {**_DEFAULTS, **{key: value for key, value in settings.items() if value is not None}}
        size = words.get("size")
        self._square = int(size["height"]) if isinstance(size, Mapping) else 728
        self._tile, self._max_tiles = int(words["patch_size"]), int(words["max_image_size"])
        self._patch, self._levels = int(words["vision_patch_size"]), as_type(levels_of(words), dtype)
        for side in (self._square, self._tile):
            if side % (4 * self._patch) or (side // self._patch) ** 2 > PATCHES_A_STEP:
                raise MediaError(f"views of {side} pixels a side are no whole tokens, or more than an encoder step")

    def __call__(self, image: Image.Image) -> tuple[Tiling, list[Patches]]:
        image = self._padded_strip(image)
        width, height = image.size
        if max(image.size) > self._max_tiles:
            scale = self._max_tiles / max(image.size)
            width, height = int(width * scale), int(height * scale)
        tiles = tiling((width, height), self._square, self._tile)
        whole = _resized(_resized(image, tiles.whole), (self._square, self._square))
        return tiles, [*self._tiles(image, tiles), self._patches([whole])]

    def _padded_strip(self, image: Image.Image) -> Image.Image:
        short, long = min(image.size), max(image.size)
        if short >= _STRIP_SIDE or long / short <= _STRIP_ASPECT:
            return image
        if long > self._max_tiles:  # a square of the whole length would not fit in memory
            scale = self._max_tiles / long
            image = _resized(image, (max(1, int(image.width * scale)), max(1, int(image.height * scale))))
        square = Image.new("RGB", (max(image.size),) * 2)
        square.paste(image)
        return square

    def _tiles(self, image: Image.Image, tiles: Tiling) -> Iterator[Patches]:
        if not tiles.window:
            return
        picture, side = _resized(image, tiles.cut), tiles.window
        boxes = [
            (x, y, min(x + side, picture.width), min(y + side, picture.height))
            for y in range(0, picture.height, side)
            for x in range(0, picture.width, side)
        ]
        yield self._patches([_resized(picture.crop(box), (self._tile, self._tile)) for box in boxes])

    def _patches(self, views: list[Image.Image]) -> Patches:
        rows = views[0].height // self._patch
        pixels = [cut(np.asarray(view), self._levels, self._patch, _ROW_BY_ROW) for view in views]
        return Patches(np.concatenate(pixels), (len(views), rows, rows), len(views) * (rows // 4) ** 2)


def _resized(image: Image.Image, size: Size) -> Image.Image:
    return image if image.size == size else image.resize(size, Image.Resampling.BILINEAR)


def _in_tiles(settings: Settings, dtype: str) -> Callable[[Image.Image], Views]:
    """Returns the function: each tile and the whole picture have a run between marks; another mark follows
    each row of tiles except the last."""

    process = TiledProcessor(settings, dtype)

    def see(image: Image.Image) -> Views:
        tiles, patches = process(image)
        parts: list[str | int] = []
        for number in range(tiles.rows * tiles.columns):
            parts += ["<patch_start>", patches[0].num_tokens // patches[0].grid[0], "<patch_end>"]
            if (number + 1) % tiles.columns == 0 and number + 1 < tiles.rows * tiles.columns:
                parts.append("<patch_newline>")
        parts += ["<im_start>", patches[-1].num_tokens, "<im_end>"]
        return Views(patches, parts)

    return see


PROCESSOR = Processor(views=_in_tiles)
