"""Pictures and videos for encoders that merge squares of patches, as the classes of transformers make them."""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
from PIL import Image

from sglang.srt.plan.media import PATCHES_A_STEP
from sglang.srt.towers.pictures.patch_types import as_type
from sglang.srt.towers.pictures.patches import ImageProcessor, MakePatches, Patches, Settings, cut, normalized
from sglang.srt.towers.pictures.video import MediaError, Video

MAX_SCALED_ASPECT = 200
"""Longest side over the shortest, as in the classes of transformers."""
PAIRS = {"temporal_patch_size": 2, "merge_size": 2, "fps": 2.0, "max_frames": 768}
"""Settings of videos whose patches have two frames."""


def transformers_class(module: str, name: str, settings: Settings) -> Any:
    """Creates the image processor `name` of a module of transformers."""
    kind = getattr(importlib.import_module(f"transformers.models.{module}"), name)
    return kind.from_dict(dict(settings))


def class_levels(processor: Any) -> np.ndarray:
    """Returns the values that a class of transformers computes for the levels of each channel, [3, 256] float32."""
    values = np.broadcast_to(np.arange(256, dtype=np.uint8), (3, 1, 256))
    if processor.do_rescale:
        values = processor.rescale(values, processor.rescale_factor)
    if processor.do_normalize:
        values = processor.normalize(values, processor.image_mean, processor.image_std)
    return np.asarray(values, np.float32)[:, 0]


def merged_images(module: str, name: str, counts_frames: bool = False) -> MakePatches:
    """Makes a processor for encoders that merge squares of patches: one grid, and a token a square. counts_frames:
    limits apply to the pixels of all frames that a patch has."""

    def make(settings: Settings, dtype: str) -> ImageProcessor:
        processor = transformers_class(module, name, settings)
        fitted = importlib.import_module(f"transformers.models.{module}").smart_resize
        patch, merge, frames = processor.patch_size, processor.merge_size, processor.temporal_patch_size
        limits = {"min_pixels": processor.size["shortest_edge"], "max_pixels": processor.size["longest_edge"]}
        limits |= {"num_frames": frames, "temporal_factor": frames} if counts_frames else {}
        levels = as_type(class_levels(processor), dtype)

        def process(image: Image.Image) -> Patches:
            if processor.do_resize:
                height, width = fitted(height=image.height, width=image.width, factor=patch * merge, **limits)
                image = image if image.size == (width, height) else image.resize((width, height), processor.resample)
            pixels = cut(np.asarray(image), levels, patch, merge, frames)
            rows, columns = image.height // patch, image.width // patch
            return Patches(pixels, (1, rows, columns), rows * columns // merge**2)

        return process

    return make


def merged_size(video: Video, count: int, settings: Settings) -> tuple[int, int]:
    """Returns width and height in whole squares of patches. `max_pixels` counts all frames, or, with
    `max_pixels_of_all` as the limit of the sum, each frame; one frame fits an encoder step."""
    factor, together = settings["patch_size"] * settings["merge_size"], settings["temporal_patch_size"]
    (width, height), count = video.size, max(count, together)
    if min(width, height) < factor:
        scale = max(factor / height, factor / width)
        width, height = int(width * scale), int(height * scale)
    if max(width, height) > MAX_SCALED_ASPECT * min(width, height):
        raise MediaError(
            f"a video is {width} x {height} pixels: a side is more than {MAX_SCALED_ASPECT} times the other"
        )
    columns, rows = round(width / factor) * factor, round(height / factor) * factor
    frames, minimum, maximum = round(count / together) * together, settings["min_pixels"], settings["max_pixels"]
    if "max_pixels_of_all" in settings:
        share = settings["max_pixels_of_all"] * together // count
        maximum, frames, count = max(min(maximum, share), int(minimum * 1.05)), 1, 1
    maximum = min(maximum, frames * PATCHES_A_STEP * settings["patch_size"] ** 2)
    if frames * rows * columns > maximum:
        shrink = math.sqrt(count * height * width / maximum)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif frames * rows * columns < minimum:
        grow = math.sqrt(minimum / (count * height * width))
        rows, columns = math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return columns, rows


def merged_patches(frames: np.ndarray, settings: Settings) -> Patches:
    """Converts frames [F, height, width, 3] uint8. The patches of a merged square are contiguous, each with the values
    of its temporal patch's frames."""
    merge, patch, together = (settings[key] for key in ("merge_size", "patch_size", "temporal_patch_size"))
    times, rows, columns = frames.shape[0] // together, frames.shape[1] // patch, frames.shape[2] // patch
    values = normalized(frames, settings)
    values = values.reshape(times, together, rows // merge, merge, patch, columns // merge, merge, patch, 3)
    pixels = values.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(times * rows * columns, -1)
    tokens = times * rows * columns // merge**2
    return Patches(np.ascontiguousarray(pixels), (times, rows, columns), tokens)
