"""Pictures of Inkling."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from sglang.srt.plan.media import PATCHES_A_STEP
from sglang.srt.towers.pictures.patch_types import as_type
from sglang.srt.towers.pictures.patches import (
    CLIP,
    ImageProcessor,
    Patches,
    Settings,
    given,
    levels_of,
    resized,
    size_of,
)
from sglang.srt.towers.pictures.processor import Processor, one_view
from sglang.srt.towers.pictures.video import MediaError

_DEFAULTS = {
    "image_mean": CLIP["image_mean"],
    "image_std": CLIP["image_std"],
    "rescale_image_max_upscaled_long_edge": 2048,
}
_SIDE, _FRAMES = 40, 2


def _beyond_the_edges(settings: Settings, dtype: str) -> ImageProcessor:
    """Makes Inkling's processor: patches row by row, with the colours of a pixel together. In the last row and column,
    pixels beyond the picture have the level below black. There is one column more than the picture has whole ones."""
    words = {**_DEFAULTS, **given(settings)}
    side = int(size_of(words).get("height", _SIDE))
    levels = as_type(levels_of(words, range(-1, 256)), dtype)
    share, maximum = words.get("rescale_image_frac"), words["rescale_image_max_upscaled_long_edge"]

    def process(image: Image.Image) -> Patches:
        picture = resized(image, scaled(image.size, share, maximum), Image.Resampling.LANCZOS)
        rows, columns = -(-picture.shape[0] // side), picture.shape[1] // side + 1
        if rows * columns > PATCHES_A_STEP:
            raise MediaError(f"{rows * columns:,} patches are more than an encoder step has ({PATCHES_A_STEP:,})")
        canvas = np.zeros((rows * side, columns * side, 3), np.int16)
        canvas[: picture.shape[0], : picture.shape[1]] = picture
        canvas[: picture.shape[0], : picture.shape[1]] += 1
        pixels = np.stack([levels[channel].take(canvas[..., channel]) for channel in range(3)], axis=-1)
        boxes = pixels.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(rows * columns, 1, -1)
        whole = np.repeat(boxes, _FRAMES, axis=1).reshape(rows * columns, -1)
        return Patches(whole, (1, rows, columns), rows * columns)

    return process


def scaled(size: tuple[int, int], share: float | None, maximum: int | None) -> tuple[int, int]:
    """Returns the width and height of a picture whose longer side is multiplied by `share`, and which is enlarged to at
    most `maximum` pixels."""
    longer = max(size)
    wanted = longer * (1.0 if share is None else share)
    if maximum is not None:
        wanted = min(wanted, max(maximum, longer))
    width, height = (max(1, math.floor(side * (wanted / longer) + 0.5)) for side in size)
    return width, height


PROCESSOR = Processor(views=one_view(_beyond_the_edges))
