"""Pictures of DeepSeek-V4.1, whose settings stand in config.json.

Source of sizes: the image processor beside the checkpoint, as vLLM and transformers describe it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from sglang.srt.errors import UserError
from sglang.srt.plan.media import PATCHES_A_STEP
from sglang.srt.towers.pictures.patch_types import as_type
from sglang.srt.towers.pictures.patches import ImageProcessor, Patches, Settings, cut, given, levels_of, size_of
from sglang.srt.towers.pictures.processor import MakeViews, Processor, one_view
from sglang.srt.towers.pictures.video import MediaError

_GREY = (127, 127, 127)
_MIN_TOKENS = 4
"""Tokens of the smallest image: one of its patches, and those around it."""


Fit = Callable[[float, float, int, int, int], tuple[int, int]]
"""Takes the width and height that a picture should have, the sides of a patch and of a token's square of patches, and
the most tokens. Returns the columns and rows of patches."""
Count = Callable[[int, int, int], int]
"""Takes columns and rows of patches and the side of a square. Returns the tokens of a picture."""


def views_of(fit: Fit, count: Count) -> MakeViews:
    """Returns the views of an encoder whose pictures have the size that `fit` finds."""
    return one_view(partial(_in_rows, fit=fit, count=count))


def _in_rows(settings: Settings, dtype: str, *, fit: Fit, count: Count) -> ImageProcessor:
    """Makes DeepSeek's processor: patches row by row of a picture that keeps its aspect ratio, with grey on both
    sides up to whole patches. In settings that transformers wrote, `size` has the fewest pixels and the most tokens."""
    words, limits = given(settings), {"shortest_edge": 544**2, "longest_edge": 1024, **size_of(settings)}
    patch, merge = int(words.get("patch_size", 14)), int(words.get("downsample_ratio", 3))
    tokens = words.get("max_image_tokens", limits["longest_edge"])
    minimum, maximum = words.get("min_pixels", limits["shortest_edge"]), min(tokens, PATCHES_A_STEP // merge**2)
    longest, levels = words.get("max_wh_ratio"), as_type(levels_of(words), dtype)

    def process(image: Image.Image) -> Patches:
        wanted = _wanted_size(image.size, minimum, longest)
        columns, rows = fit(*wanted, patch, merge, maximum)
        if not (columns and rows) or count(columns, rows, merge) > maximum:
            raise MediaError(f"a picture of {image.width} x {image.height} pixels does not fit in {maximum} tokens")
        size = (columns * patch, rows * patch)
        if longest is not None and image.width >= longest * image.height:
            picture = image.resize(size)
        else:
            picture = ImageOps.pad(image, size, color=_GREY)
        patches = cut(np.asarray(picture), levels, patch, merge=1)
        return Patches(patches, (1, rows, columns), count(columns, rows, merge))

    return process


def _wanted_size(size: tuple[int, int], minimum: int, longest: float | None) -> tuple[float, float]:
    """Returns the width and height of a picture that has at least `minimum` pixels. One more than `longest` times as
    wide as high counts as narrower. Raises MediaError."""
    width, height = (float(side) for side in size)
    if longest is not None:
        width = min(width, height * longest)
    if width * height < minimum:
        grow = (minimum / (width * height)) ** 0.5
        width, height = float(int(width * grow)), float(int(height * grow))
    if min(width, height) < 1:
        raise MediaError(f"a picture is {size[0]} x {size[1]} pixels: a side is too short for the other")
    return width, height


def _fit(width: float, height: float, patch: int, merge: int, maximum: int) -> tuple[int, int]:
    columns, rows = math.ceil(width / patch), math.ceil(height / patch)
    if _tokens(columns, rows, merge) > maximum:
        return _max_patches(width, height, patch, merge, maximum)
    return columns, rows


def _tokens(columns: int, rows: int, merge: int) -> int:
    """Counts a token that ends each row, and two for the picture."""
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


def check_limits(settings: Settings) -> None:
    """Raises UserError for limits that are not supported."""
    maximum = settings.get("max_image_tokens", _MIN_TOKENS)
    if type(maximum) is not int or maximum < _MIN_TOKENS:
        raise UserError(f"max_image_tokens must be a whole number from {_MIN_TOKENS} on; got {maximum!r}.")
    if "max_pixels" in settings:
        raise UserError("This model limits an image by its tokens; use max_image_tokens in place of max_pixels.")


def _keys(config: Mapping[str, Any]) -> Settings:
    keys = config.get("vision_config")
    return keys if isinstance(keys, Mapping) else {}


PROCESSOR = Processor(views=views_of(_fit, _tokens), keys=_keys, check=check_limits)
