"""Pictures of DeepSeek-V4.1, whose settings stand in config.json.

Source of sizes: the image processor beside the checkpoint, as vLLM and transformers describe it.
"""

from __future__ import annotations

import math

import numpy as np
from PIL import Image, ImageOps

from sglang.srt.errors import UserError
from sglang.srt.plan.media import PATCHES_A_STEP
from sglang.srt.towers.pictures.patch_types import as_type
from sglang.srt.towers.pictures.patches import ImageProcessor, Patches, Settings, cut, given, levels_of, size_of
from sglang.srt.towers.pictures.processor import Processor, one_view
from sglang.srt.towers.pictures.video import MediaError

_GREY = (127, 127, 127)
_MIN_TOKENS = 4
"""Tokens of the smallest image: one of its patches, and those around it."""


def _in_rows(settings: Settings, dtype: str) -> ImageProcessor:
    """Makes DeepSeek-V4.1's processor: patches row by row of a picture that keeps its aspect ratio, with grey on both
    sides up to whole patches. In settings that transformers wrote, `size` has the fewest pixels and the most tokens."""
    words, limits = given(settings), {"shortest_edge": 544**2, "longest_edge": 1024, **size_of(settings)}
    patch, merge = int(words.get("patch_size", 14)), int(words.get("downsample_ratio", 3))
    tokens = words.get("max_image_tokens", limits["longest_edge"])
    minimum, maximum = words.get("min_pixels", limits["shortest_edge"]), min(tokens, PATCHES_A_STEP // merge**2)
    longest, levels = words.get("max_wh_ratio"), as_type(levels_of(words), dtype)

    def process(image: Image.Image) -> Patches:
        size = within_rows_of_tokens(image.size, patch, merge, minimum, maximum, longest)
        if longest is not None and image.width >= longest * image.height:
            picture = image.resize(size)
        else:
            picture = ImageOps.pad(image, size, color=_GREY)
        rows, columns = size[1] // patch, size[0] // patch
        num_tokens = -(-rows // merge) * (-(-columns // merge) + 1) + 2
        return Patches(cut(np.asarray(picture), levels, patch, merge=1), (1, rows, columns), num_tokens)

    return process


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


def _check(settings: Settings) -> None:
    """Raises UserError for limits that are not supported."""
    maximum = settings.get("max_image_tokens", _MIN_TOKENS)
    if type(maximum) is not int or maximum < _MIN_TOKENS:
        raise UserError(f"max_image_tokens must be a whole number from {_MIN_TOKENS} on; got {maximum!r}.")
    if "max_pixels" in settings:
        raise UserError("This model limits an image by its tokens; use max_image_tokens in place of max_pixels.")


PROCESSOR = Processor(
    views=one_view(_in_rows),
    reads_config=True,
    check=_check,
)
