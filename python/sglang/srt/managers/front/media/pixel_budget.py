"""Sizes of pictures within a budget of pixels or tokens, in whole squares of patches (MiniMax-M3, Muse-Glimmer) or
whole patches (DeepSeek-V4.1).

Source: `smart_resize` of the first two's processors in transformers 5.23, whose modules need torchvision; the image
processor beside V4.1's checkpoint, as vLLM and transformers describe it.
"""

from __future__ import annotations

import math
from itertools import product

from sglang.srt.managers.front.media.decoding import MediaError

MAX_SCALED_ASPECT = 200
"""Longest side over the shortest, as in the classes of transformers."""


def within(size: tuple[int, int], factor: int, minimum: int, maximum: int) -> tuple[int, int]:
    """Returns the width and height nearest to `size` that are multiples of `factor`. If these have more than `maximum`
    or fewer than `minimum` pixels, returns the largest or smallest size of the same aspect ratio. Raises MediaError."""
    width, height = size
    if max(size) > MAX_SCALED_ASPECT * min(size):
        raise MediaError(
            f"a picture is {width} x {height} pixels: a side is more than {MAX_SCALED_ASPECT} times the other"
        )
    columns, rows = round(width / factor), round(height / factor)
    if columns * rows * factor**2 > maximum:
        shrink = math.sqrt(height * width / maximum)
        columns, rows = (max(1, math.floor(side / shrink / factor)) for side in size)
    elif columns * rows * factor**2 < minimum:
        grow = math.sqrt(minimum / (height * width))
        columns, rows = (math.ceil(side * grow / factor) for side in size)
    return columns * factor, rows * factor


def nearest_shape(size: tuple[int, int], factor: int, maximum: int) -> tuple[int, int]:
    """Returns the width and height in whole squares of `factor` pixels a side, at most `maximum` squares, whose aspect
    ratio is nearest to that of `size`. A picture that is far longer than wide may get more squares."""
    columns, rows = (side / factor for side in size)
    if columns * rows > maximum:
        ratio = columns / rows
        rows = (maximum / ratio) ** 0.5
        columns = rows * ratio
    # A set, as in the reference classes: for a square picture two shapes are equally near; the set's first wins.
    shapes = set(product((math.floor(rows), math.ceil(rows)), (math.floor(columns), math.ceil(columns))))
    fitting = [(r, c) for r, c in shapes if r and c and r * c <= maximum]
    fitting = fitting or [(max(1, round(rows)), max(1, round(columns)))]
    rows, columns = min(fitting, key=lambda shape: abs(shape[0] / shape[1] - size[1] / size[0]))
    return columns * factor, rows * factor


def within_rows_of_tokens(
    size: tuple[int, int], patch: int, merge: int, minimum: int, maximum: int, longest: float | None = None
) -> tuple[int, int]:
    """Returns the width and height in whole patches of a picture with at least `minimum` pixels. Its squares of `merge`
    x `merge` patches are at most `maximum` tokens, counting one more for each row and two for the picture. A picture
    more than `longest` times as wide as high counts as narrower. Raises MediaError."""
    width, height = (float(side) for side in size)
    if longest is not None:
        width = min(width, height * longest)
    if width * height < minimum:
        grow = (minimum / (width * height)) ** 0.5
        width, height = float(int(width * grow)), float(int(height * grow))
    if min(width, height) < 1:
        raise MediaError(f"a picture is {size[0]} x {size[1]} pixels: a side is too short for the other")
    columns, rows = math.ceil(width / patch), math.ceil(height / patch)
    if _tokens(columns, rows, merge) > maximum:
        columns, rows = _max_patches(width, height, patch, merge, maximum)
    if not (columns and rows) or _tokens(columns, rows, merge) > maximum:
        raise MediaError(f"a picture of {size[0]} x {size[1]} pixels does not fit in {maximum} tokens")
    return columns * patch, rows * patch


def _tokens(columns: int, rows: int, merge: int) -> int:
    return math.ceil(rows / merge) * (math.ceil(columns / merge) + 1) + 2


def _max_patches(width: float, height: float, patch: int, merge: int, maximum: int) -> tuple[int, int]:
    """Returns the columns and rows of the largest picture of this aspect ratio within `maximum` tokens."""
    shape = height / width
    columns = math.sqrt((maximum - 2) / shape + 0.25) - 0.5
    rows, side = columns * shape, patch * merge
    if columns < 1:
        return merge, (maximum - 2) // 2 * merge
    if rows < 1:
        return (maximum - 3) * merge, merge
    scale = min(math.floor(columns) * side / width, math.floor(rows) * side / height)
    return math.floor(width * scale / patch), math.floor(height * scale / patch)
