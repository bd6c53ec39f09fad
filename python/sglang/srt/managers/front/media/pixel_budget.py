"""Sizes of pictures whose pixels, or tokens, are within a budget, in whole squares of patches: MiniMax-M3's and
Muse-Glimmer's.

Source: `smart_resize` of their processors in transformers 5.23, whose modules need torchvision.
"""

from __future__ import annotations

import math
from itertools import product

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


def nearest_shape(size: tuple[int, int], factor: int, most: int) -> tuple[int, int]:
    """Returns the width and the height in whole squares of `factor` pixels a side, at most `most` of them, whose shape
    is nearest to that of `size`. A picture that is far longer than it is wide may have more."""
    columns, rows = (side / factor for side in size)
    if columns * rows > most:
        ratio = columns / rows
        rows = (most / ratio) ** 0.5
        columns = rows * ratio
    # In a set: of a square picture two shapes are as near, and the classes take that which comes first.
    shapes = set(product((math.floor(rows), math.ceil(rows)), (math.floor(columns), math.ceil(columns))))
    fitting = [(r, c) for r, c in shapes if r and c and r * c <= most]
    fitting = fitting or [(max(1, round(rows)), max(1, round(columns)))]
    rows, columns = min(fitting, key=lambda shape: abs(shape[0] / shape[1] - size[1] / size[0]))
    return columns * factor, rows * factor
