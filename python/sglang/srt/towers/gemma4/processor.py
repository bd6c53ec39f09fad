"""Pictures and videos of Gemma 4, whose encoder pools patches to tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image

from sglang.srt.towers.pictures.frames import steps
from sglang.srt.towers.pictures.merged import transformers_class
from sglang.srt.towers.pictures.patch_types import as_type
from sglang.srt.towers.pictures.patches import ImageProcessor, Patches, Settings, normalized
from sglang.srt.towers.pictures.processor import Processor, one_view
from sglang.srt.towers.pictures.video import MediaError, Video
from sglang.srt.towers.pictures.video_processor import VideoForm


def _pooled(settings: Settings, dtype: str) -> ImageProcessor:
    """Makes Gemma 4's processor: patches row by row, which the encoder pools to tokens."""
    processor = transformers_class("gemma4.image_processing_pil_gemma4", "Gemma4ImageProcessorPil", settings)

    def process(image: Image.Image) -> Patches:
        result = processor(image, return_tensors="np")
        tokens = int(result["num_soft_tokens_per_image"][0])
        count = tokens * processor.pooling_kernel_size**2
        positions = np.asarray(result["image_position_ids"][0][:count], np.int32)
        columns, rows = (int(size) + 1 for size in positions.max(0))
        return Patches(as_type(result["pixel_values"][0][:count], dtype), (1, rows, columns), tokens)

    return process


def _fixed_number(video: Video, settings: Settings) -> list[int]:
    """Selects frames for Gemma 4: always `num_frames`, in equal steps from the first on; all frames of a shorter
    video."""
    return steps(video.num_frames, min(settings["num_frames"], video.num_frames))


def _clocks(times: Sequence[float], tokens: int) -> list[str | int]:
    """Writes Gemma 4's parts: minutes and seconds before each frame; its tokenizer has the marks around a run."""
    parts: list[str | int] = []
    for number, time in enumerate(times):
        clock = f"{int(time // 60):02d}:{int(time % 60):02d} "
        parts += [clock if number == 0 else f" {clock}", tokens]
    return parts


def _pooled_size(video: Video, count: int, settings: Settings) -> tuple[int, int]:
    """Returns the size for Gemma 4: the largest of the same aspect ratio whose pooled patches are within
    `max_soft_tokens`."""
    (width, height), maximum = video.size, settings["max_soft_tokens"]
    side = settings["patch_size"] * settings["pooling_kernel_size"]
    scale = math.sqrt(maximum * side**2 / (width * height))
    columns, rows = math.floor(scale * width / side), math.floor(scale * height / side)
    if not columns and not rows:
        raise MediaError(f"a video is {width} x {height} pixels, of which nothing would be left")
    if not columns or not rows:  # one row, or one column
        long = min(max(width, height) // min(width, height), maximum)
        columns, rows = (1, long) if not columns else (long, 1)
    return columns * side, rows * side


def _row_by_row(frames: np.ndarray, settings: Settings) -> Patches:
    """Converts frames [F, height, width, 3] uint8. The values of a patch are those of its pixels, one after the
    other."""
    patch, pool = settings["patch_size"], settings["pooling_kernel_size"]
    count, rows, columns = frames.shape[0], frames.shape[1] // patch, frames.shape[2] // patch
    values = normalized(frames, settings).reshape(count, rows, patch, columns, patch, 3)
    pixels = values.transpose(0, 1, 3, 2, 4, 5).reshape(count * rows * columns, -1)
    return Patches(np.ascontiguousarray(pixels), (count, rows, columns), count * rows * columns // pool**2)


_VIDEO = {
    "image_mean": (0.0,) * 3,
    "image_std": (1.0,) * 3,
    "patch_size": 16,
    "max_soft_tokens": 70,
    "pooling_kernel_size": 3,
    "num_frames": 32,
    "temporal_patch_size": 1,
    "max_frames": 768,
}


PROCESSOR = Processor(
    views=one_view(_pooled),
    video=VideoForm(_fixed_number, _clocks, _VIDEO, size=_pooled_size, patches=_row_by_row),
)
