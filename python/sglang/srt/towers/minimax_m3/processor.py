"""Pictures and videos of MiniMax-M3.

Source of sizes: `smart_resize` of its processors in transformers 5.23, whose modules need torchvision.
"""

from __future__ import annotations

import math

from PIL import Image

from sglang.srt.plan.media import PATCHES_A_STEP
from sglang.srt.towers.pictures.frames import each_frame, steps
from sglang.srt.towers.pictures.merged import MAX_SCALED_ASPECT
from sglang.srt.towers.pictures.patch_types import as_type
from sglang.srt.towers.pictures.patches import (
    CLIP,
    ImageProcessor,
    Patches,
    Settings,
    cut,
    given,
    levels_of,
    resized,
    size_of,
)
from sglang.srt.towers.pictures.processor import Processor, one_view
from sglang.srt.towers.pictures.video import MediaError, Video
from sglang.srt.towers.pictures.video_processor import VideoForm

_CLIP_FRAMES = 4
"""Frames that attend to one another."""
_IMAGE = {**CLIP, "merge_size": 2, "temporal_patch_size": 2}


def _within_a_budget(settings: Settings, dtype: str) -> ImageProcessor:
    """Makes MiniMax-M3's processor: the nearest whole squares of patches whose pixels are within two limits. The `size`
    in published files is not used."""
    words = {**_IMAGE, **given(settings)}
    patch, merge, frames = (int(words[key]) for key in ("patch_size", "merge_size", "temporal_patch_size"))
    limits = {"shortest_edge": 4 * 28**2, "longest_edge": 672**2, **size_of(settings)}
    minimum, maximum = limits["shortest_edge"], min(limits["longest_edge"], PATCHES_A_STEP * patch**2)
    levels = as_type(levels_of(words), dtype)

    def process(image: Image.Image) -> Patches:
        picture = resized(image, within(image.size, patch * merge, minimum, maximum))
        rows, columns = picture.shape[0] // patch, picture.shape[1] // patch
        return Patches(cut(picture, levels, patch, merge, frames), (1, rows, columns), rows * columns // merge**2)

    return process


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


def _by_rate_at_least(video: Video, settings: Settings) -> list[int]:
    """Selects frames for MiniMax-M3: `fps` frames a second, but at least `min_frames`, in equal steps from the first
    on."""
    count = max(int(video.num_frames / video.fps * settings["fps"]), settings["min_frames"])
    return steps(video.num_frames, min(count, settings["max_frames"], video.num_frames))


def _size_of_each(video: Video, count: int, settings: Settings) -> tuple[int, int]:
    """Returns the size for MiniMax-M3: `max_pixels` is a limit of each frame; frames that attend to one another fit an
    encoder step."""
    patch = settings["patch_size"]
    maximum = min(settings["max_pixels"], PATCHES_A_STEP // _CLIP_FRAMES * patch**2)
    return within(video.size, patch * settings["merge_size"], settings["min_pixels"], maximum)


_VIDEO = {
    **_IMAGE,
    "fps": 1.0,
    "min_frames": 4,
    "max_frames": 768,
    "min_pixels": 4 * 28**2,
    "max_pixels": 768 * 28**2,
}


PROCESSOR = Processor(
    views=one_view(_within_a_budget, "]<]start of image[>[", "]<]end of image[>["),
    video=VideoForm(
        _by_rate_at_least,
        each_frame("]<]{} seconds[>[]<]start of image[>[", "]<]end of image[>[", "{:.1f}".format),
        _VIDEO,
        size=_size_of_each,
    ),
)
