"""Pictures and videos of GLM-5.3-Flash: they keep their aspect ratio on a canvas of whole squares of patches, with
black below and right.

Source: the processors of GLM-5.3-Flash in transformers 5.17.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from sglang.srt.plan.media import PATCHES_A_STEP
from sglang.srt.towers.glm4v.processor import FRAME_MARKS
from sglang.srt.towers.pictures.frames import by_interval, each_frame
from sglang.srt.towers.pictures.merged import PAIRS, class_levels, transformers_class
from sglang.srt.towers.pictures.patch_types import as_type
from sglang.srt.towers.pictures.patches import CLIP, ImageProcessor, Patches, Settings, cut, padded
from sglang.srt.towers.pictures.processor import Processor, one_view
from sglang.srt.towers.pictures.video import MediaError, Video
from sglang.srt.towers.pictures.video_processor import VideoForm

Size = tuple[int, int]
"""Width and height, in pixels."""
_KEYS = (
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


def _on_a_canvas(settings: Settings, dtype: str) -> ImageProcessor:
    """Makes GLM-5.3-Flash's processor: a picture keeps its aspect ratio, and black is added up to whole squares of
    patches."""
    processor = transformers_class("glm5_next.image_processing_pil_glm5_next", "Glm5NextImageProcessorPil", settings)
    words = {name: getattr(processor, name) for name in _KEYS}
    patch, merge, frames = processor.patch_size, processor.merge_size, processor.temporal_patch_size
    levels = as_type(class_levels(processor), dtype)

    def process(image: Image.Image) -> Patches:
        size = fitted(image.size, frames, words)
        image = image if image.size == size.content else image.resize(size.content, processor.resample)
        (picture,) = padded(np.asarray(image)[None], size.size)
        rows, columns = picture.shape[0] // patch, picture.shape[1] // patch
        return Patches(cut(picture, levels, patch, merge, frames), (1, rows, columns), rows * columns // merge**2)

    return process


def _by_rate_and_time(video: Video, settings: Settings) -> list[int]:
    """Selects frames for GLM-5.3-Flash: `fps` frames a second; a video longer than `max_duration` seconds (if not 0)
    gets as many as one of that length."""
    rate, counted = settings["fps"], video.num_frames / video.fps
    if settings["max_duration"] > 0:
        counted = min(counted, settings["max_duration"])
    return by_interval(video, rate, min(int(counted * rate), settings["max_frames"]))


def _content(video: Video, count: int, settings: Settings) -> Size:
    return fitted(video.size, count, settings).content


def _canvas(video: Video, count: int, settings: Settings) -> Size:
    return fitted(video.size, count, settings).size


_VIDEO = {
    **PAIRS,
    **CLIP,
    "max_frames": 2048,
    "max_duration": 0,
    "patch_expand_factor": 1,
    "min_image_tokens": 16,
    "max_image_tokens": 240000,
}


PROCESSOR = Processor(
    views=one_view(_on_a_canvas),
    video=VideoForm(
        _by_rate_and_time,
        each_frame(*FRAME_MARKS, "{:.1f} seconds".format),
        _VIDEO,
        size=_content,
        padding=_canvas,
    ),
)
