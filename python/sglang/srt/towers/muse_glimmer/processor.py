"""Pictures and videos of Muse-Glimmer.

Source of sizes: `smart_resize` of its processors in transformers 5.23, whose modules need torchvision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
from PIL import Image

from sglang.srt.plan.media import PATCHES_A_STEP
from sglang.srt.towers.pictures.patch_types import as_type
from sglang.srt.towers.pictures.patches import (
    ImageProcessor,
    Patches,
    Settings,
    cut,
    given,
    levels_of,
    normalized,
    resized,
)
from sglang.srt.towers.pictures.processor import Processor, one_view
from sglang.srt.towers.pictures.video import Video
from sglang.srt.towers.pictures.video_processor import VideoForm, Written

_IMAGE = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}


def _nearest_shape(settings: Settings, dtype: str) -> ImageProcessor:
    """Makes Muse-Glimmer's processor: patches row by row, with the colours of a frame together."""
    words = {**_IMAGE, "max_image_tokens": 4096, **given(settings)}
    patch, merge, frames = (int(words[key]) for key in ("patch_size", "merge_size", "temporal_patch_size"))
    maximum, levels = min(int(words["max_image_tokens"]), PATCHES_A_STEP // merge**2), as_type(levels_of(words), dtype)

    def process(image: Image.Image) -> Patches:
        picture = resized(image, nearest_shape(image.size, patch * merge, maximum), Image.Resampling.LANCZOS)
        rows, columns = picture.shape[0] // patch, picture.shape[1] // patch
        pixels = cut(picture, levels, patch, 1, frames, colours_first=False)
        return Patches(pixels, (1, rows, columns), rows * columns // merge**2)

    return process


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


def _pairs_by_rate(video: Video, settings: Settings) -> list[int]:
    """Selects frames for Muse-Glimmer: `fps` frames a second, at most `num_frames`, in whole pairs from the first to
    the last. The reference class rounds in float32, so one frame in a thousand is the preceding one there."""
    together, total = settings["temporal_patch_size"], video.num_frames
    count = min(int(total * settings["fps"] / video.fps), settings["num_frames"], total)
    count = min(max(together, count // together * together), total)
    return [number * (total - 1) // max(count - 1, 1) for number in range(count)]


def _closed_by(start: str, clock: Callable[[float], str], between: str, end: str) -> Written:
    """Writes each frame's time and run, a mark between two frames, and marks around all."""

    def written(times: Sequence[float], tokens: int) -> list[str | int]:
        parts: list[str | int] = []
        for number, time in enumerate(times):
            parts += [(between if number else start) + clock(time), tokens]
        return [*parts, end]

    return written


def _frame_size(video: Video, count: int, settings: Settings) -> tuple[int, int]:
    """Returns the size for Muse-Glimmer: `max_video_frame_tokens` is a limit of each frame."""
    merge = settings["merge_size"]
    maximum = min(settings["max_video_frame_tokens"], PATCHES_A_STEP // merge**2)
    return nearest_shape(video.size, settings["patch_size"] * merge, maximum)


def _frame_by_frame(frames: np.ndarray, settings: Settings) -> Patches:
    """Converts frames [F, height, width, 3] uint8 to patches row by row, each with the values of its temporal patch,
    one frame after the other."""
    merge, patch, together = (settings[key] for key in ("merge_size", "patch_size", "temporal_patch_size"))
    times, rows, columns = frames.shape[0] // together, frames.shape[1] // patch, frames.shape[2] // patch
    values = normalized(frames, settings).reshape(times, together, rows, patch, columns, patch, 3)
    pixels = values.transpose(0, 2, 4, 1, 6, 3, 5).reshape(times * rows * columns, -1)
    return Patches(np.ascontiguousarray(pixels), (times, rows, columns), times * rows * columns // merge**2)


_VIDEO = {**_IMAGE, "fps": 2.0, "num_frames": 96, "max_frames": 768, "max_video_frame_tokens": 144}


PROCESSOR = Processor(
    views=one_view(_nearest_shape, "<|image_start|>", "<|image_end|>"),
    video=VideoForm(
        _pairs_by_rate,
        _closed_by("<|vid_start|>", "Time: {:.1f}s".format, "<|vid_frame_separator|>", "<|vid_end|>"),
        _VIDEO,
        size=_frame_size,
        patches=_frame_by_frame,
        resample=Image.Resampling.LANCZOS,
    ),
)
