"""Sizes of pictures whose pixels are within a budget, in whole squares of patches: MiniMax-M3's.

Source: `smart_resize` of MiniMax-M3's processors in transformers 5.23, whose module needs torchvision.
"""

from __future__ import annotations

import math

from sglang.srt.managers.front.media.decoding import MediaError

MAX_SCALED_ASPECT = 200
"""Longest side over the shortest, as the classes of transformers have it."""


def within(size: tuple[int, int], factor: int, least: int, most: int) -> tuple[int, int]:
    """Returns the width and the height nearest to `size` that are multiples of `factor`, or where these have more than
    `most` or fewer than `least` pixels, the largest or smallest of the same shape. Raises MediaError."""
    width, height = size
    if max(size) > MAX_SCALED_ASPECT * min(size):
        raise MediaError(
            f"a picture is {width} x {height} pixels: a side is more than {MAX_SCALED_ASPECT} times the other"
        )
    columns, rows = round(width / factor), round(height / factor)
    if columns * rows * factor**2 > most:
        shrink = math.sqrt(height * width / most)
        columns, rows = (max(1, math.floor(side / shrink / factor)) for side in size)
    elif columns * rows * factor**2 < least:
        grow = math.sqrt(least / (height * width))
        columns, rows = (math.ceil(side * grow / factor) for side in size)
    return columns * factor, rows * factor
