"""Resizing of pictures that keep their aspect ratio on a canvas of whole squares of patches, with black padding below
and right.

Source: the processors of GLM-5.3-Flash in transformers 5.17.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang.srt.managers.front.media.decoding import MediaError
from sglang.srt.plan.media import PATCHES_A_STEP

Size = tuple[int, int]
"""Width and height, in pixels."""
KEYS = (
    "patch_size",
    "merge_size",
    "temporal_patch_size",
    "patch_expand_factor",
    "min_image_tokens",
    "max_image_tokens",
)
"""Settings that `fitted` reads."""


@dataclass(frozen=True, slots=True)
class Canvas:
    """`size` of the canvas, and `content`, the size of the picture in its upper left corner."""

    size: Size
    content: Size

    def around(self, pictures: np.ndarray) -> np.ndarray:
        """Pads pictures [N, height, width, 3] uint8 of the content's size to the canvas."""
        shape = (len(pictures), self.size[1], self.size[0], 3)
        canvas = np.zeros(shape, np.uint8)
        canvas[:, : self.content[1], : self.content[0]] = pictures
        return canvas


def fitted(size: Size, frames: int, settings: Mapping[str, Any]) -> Canvas:
    """Returns the canvas for `frames` frames of this size. Their tokens are at least `min_image_tokens` (small pictures
    are enlarged) and at most `max_image_tokens` (large ones are shrunk), and one frame fits an encoder step. Raises
    MediaError if there are more frames than allowed tokens."""
    (width, height), together = size, settings["temporal_patch_size"]
    side = settings["patch_size"] * settings["merge_size"] * settings["patch_expand_factor"]
    counted = max(together, round(frames / together) * together)
    pixels_of_a_token = together * side**2
    minimum = settings["min_image_tokens"] * pixels_of_a_token
    maximum = settings["max_image_tokens"] * pixels_of_a_token
    maximum = min(maximum, counted * PATCHES_A_STEP * settings["patch_size"] ** 2)

    def whole(wide: int, high: int) -> Size:
        return -(-wide // side) * side, -(-high // side) * side

    def pixels(canvas: Size) -> int:
        return counted * canvas[0] * canvas[1]

    def size_for_height(high: int) -> Size:
        return whole(max(1, math.floor(width * high / height)), high)

    canvas = whole(width, height)
    if pixels(canvas) < minimum:
        grow = math.sqrt(minimum / (frames * height * width))
        canvas = whole(math.ceil(width * grow), math.ceil(height * grow))
    if pixels(canvas) > maximum:
        if counted * side**2 > maximum:
            raise MediaError(f"a video has {frames} frames, more than there may be tokens")
        fitting = bisect.bisect_right(range(1, height + 1), maximum, key=lambda high: pixels(size_for_height(high)))
        canvas = size_for_height(fitting) if fitting else (side, side)
    scale = min(canvas[0] / width, canvas[1] / height)
    if frames * height * width >= minimum:
        scale = min(1.0, scale)
    content = (max(1, min(canvas[0], math.floor(width * scale))), max(1, min(canvas[1], math.floor(height * scale))))
    return Canvas(canvas, content)
