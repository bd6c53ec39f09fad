"""Pictures to the patches that a model's encoder takes, as the files of the model say.

Images go through the classes of transformers that work on numpy arrays, without torch and torchvision. It has no such
class for the images of Kimi K2.5 and for videos: those are computed here, from the same settings.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from sglang.srt.managers.front.media.decoding import MediaError, Video
from sglang.srt.managers.front.media.processor_files import ProcessorFiles

Settings = Mapping[str, Any]

MAX_SCALED_ASPECT = 200
"""Longest side over the shortest, as the classes of transformers have it."""


@dataclass(frozen=True, slots=True)
class Patches:
    """`pixels` [patches, values a patch] float32; `grid`: frames, rows and columns of patches."""

    pixels: np.ndarray
    grid: tuple[int, int, int]
    num_tokens: int
    """Number of placeholders."""
    extra: Mapping[str, np.ndarray]


ImageProcessor = Callable[[Image.Image], Patches]


def image_processor(files: ProcessorFiles) -> ImageProcessor:
    """The processor of the model's images."""
    return _IMAGES[files.family](files.image)


def _transformers_class(module: str, name: str, settings: Settings) -> Any:
    kind = getattr(importlib.import_module(f"transformers.models.{module}"), name)
    return kind.from_dict(dict(settings))


def _merged(module: str, name: str) -> Callable[[Settings], ImageProcessor]:
    """Processors whose encoder merges squares of patches: a grid, and a token a square."""

    def make(settings: Settings) -> ImageProcessor:
        processor = _transformers_class(module, name, settings)

        def process(image: Image.Image) -> Patches:
            result = processor(image, return_tensors="np")
            frames, rows, columns = (int(count) for count in result["image_grid_thw"][0])
            tokens = frames * rows * columns // processor.merge_size**2
            return Patches(result["pixel_values"], (frames, rows, columns), tokens, {})

        return process

    return make


def _pooled(settings: Settings) -> ImageProcessor:
    """Gemma 4: patches with their positions [patches, 2] (column, row), pooled to tokens by the encoder."""
    processor = _transformers_class("gemma4.image_processing_pil_gemma4", "Gemma4ImageProcessorPil", settings)

    def process(image: Image.Image) -> Patches:
        result = processor(image, return_tensors="np")
        tokens = int(result["num_soft_tokens_per_image"][0])
        count = tokens * processor.pooling_kernel_size**2
        positions = np.asarray(result["image_position_ids"][0][:count], np.int32)
        columns, rows = (int(size) + 1 for size in positions.max(0))
        return Patches(result["pixel_values"][0][:count], (1, rows, columns), tokens, {"positions": positions})

    return process


def _native_size(settings: Settings) -> ImageProcessor:
    """Kimi K2.5: a picture is never enlarged; black is added below and to the right up to whole squares of patches."""
    patch, merge = int(settings.get("patch_size", 14)), int(settings.get("merge_size", 2))
    most = int(settings.get("max_patches", 16384))
    side = int(_size(settings).get("max_height", 512)) * patch

    def process(image: Image.Image) -> Patches:
        width, height = image.size
        fitting = max(1, width // patch) * max(1, height // patch)
        scale = min(1.0, math.sqrt(most / fitting), side / width, side / height)
        width, height = (min(side, max(1, int(size * scale))) for size in (width, height))
        resized = _resized(image, (width, height))
        factor = patch * merge
        canvas = np.zeros((-(-height // factor) * factor, -(-width // factor) * factor, 3), np.uint8)
        canvas[:height, :width] = resized
        rows, columns = canvas.shape[0] // patch, canvas.shape[1] // patch
        values = _normalized(canvas, settings).reshape(rows, patch, columns, patch, 3)
        pixels = values.transpose(0, 2, 4, 1, 3).reshape(rows * columns, -1)
        return Patches(np.ascontiguousarray(pixels), (1, rows, columns), rows * columns // merge**2, {})

    return process


_QWEN = _merged("qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil")
_IMAGES: Mapping[str, Callable[[Settings], ImageProcessor]] = {
    "qwen3_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "glm4v": _merged("glm4v.image_processing_pil_glm4v", "Glm4vImageProcessorPil"),
    "glm46v": _merged("glm46v.image_processing_pil_glm46v", "Glm46VImageProcessorPil"),
    "gemma4": _pooled,
    "kimi_k25": _native_size,
}
FAMILIES = tuple(_IMAGES)


# --- videos -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class VideoPatches:
    """`times`: the time in seconds of each frame of the grid."""

    patches: Patches
    times: list[float]


class TimedVideoProcessor:
    """Qwen3-VL and Qwen3.5: frames at `fps`, pairs of which are merged, each written with its time."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._patch, self._merge = int(settings.get("patch_size", 16)), int(settings.get("merge_size", 2))
        self._merged_frames = int(settings.get("temporal_patch_size", 2))
        self._fps = float(settings.get("fps") or 2)
        self._min_frames, self._max_frames = int(settings.get("min_frames", 4)), int(settings.get("max_frames", 768))
        size = _size(settings)
        self._min_pixels = int(size.get("shortest_edge", 128 * 32 * 32))
        self._max_pixels = int(size.get("longest_edge", 32 * 32 * 768))

    def __call__(self, video: Video) -> VideoPatches:
        indices = self._indices(video)
        size = self._frame_size(len(indices), *video.size)
        frames = [_resized(frame, size) for frame in video.frames(indices)]
        whole = -(-len(frames) // self._merged_frames) * self._merged_frames
        frames += frames[-1:] * (whole - len(frames))
        indices += indices[-1:] * (whole - len(indices))
        firsts, lasts = indices[:: self._merged_frames], indices[self._merged_frames - 1 :: self._merged_frames]
        times = [(first + last) / 2 / video.fps for first, last in zip(firsts, lasts, strict=True)]
        return VideoPatches(self._patches(np.stack(frames)), times)

    def _indices(self, video: Video) -> list[int]:
        if getattr(video, "is_sampled", False):
            if video.num_frames > self._max_frames:
                raise MediaError(f"a video has {video.num_frames} frames; the model takes {self._max_frames}")
            return list(range(video.num_frames))
        wanted = int(video.num_frames / video.fps * self._fps)
        count = min(max(wanted, self._min_frames), self._max_frames, video.num_frames)
        return [int(index) for index in np.linspace(0, video.num_frames - 1, count).round()]

    def _frame_size(self, count: int, width: int, height: int) -> tuple[int, int]:
        """Width and height in whole squares of patches; the limits are of the pixels of all frames."""
        factor, count = self._patch * self._merge, max(count, self._merged_frames)
        if min(width, height) < factor:
            scale = max(factor / height, factor / width)
            width, height = int(width * scale), int(height * scale)
        if max(width, height) > MAX_SCALED_ASPECT * min(width, height):
            raise MediaError(
                f"a video is {width} x {height} pixels: a side is more than {MAX_SCALED_ASPECT} times the other"
            )
        columns, rows = round(width / factor) * factor, round(height / factor) * factor
        frames = round(count / self._merged_frames) * self._merged_frames
        if frames * rows * columns > self._max_pixels:
            shrink = math.sqrt(count * height * width / self._max_pixels)
            rows = max(factor, math.floor(height / shrink / factor) * factor)
            columns = max(factor, math.floor(width / shrink / factor) * factor)
        elif frames * rows * columns < self._min_pixels:
            grow = math.sqrt(self._min_pixels / (count * height * width))
            rows, columns = math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
        return columns, rows

    def _patches(self, frames: np.ndarray) -> Patches:
        """frames [F, height, width, 3] uint8. Patches of a square of the merge follow one another."""
        merge, patch, together = self._merge, self._patch, self._merged_frames
        times, rows, columns = frames.shape[0] // together, frames.shape[1] // patch, frames.shape[2] // patch
        values = _normalized(frames, self._settings)
        values = values.reshape(times, together, rows // merge, merge, patch, columns // merge, merge, patch, 3)
        pixels = values.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(times * rows * columns, -1)
        tokens = times * rows * columns // merge**2
        return Patches(np.ascontiguousarray(pixels), (times, rows, columns), tokens, {})


VIDEO_FAMILIES = ("qwen3_vl",)


def _size(settings: Settings) -> Mapping[str, Any]:
    size = settings.get("size")
    return size if isinstance(size, Mapping) else {}


def _resized(image: Image.Image, size: tuple[int, int]) -> np.ndarray:
    """[height, width, 3] uint8."""
    return np.asarray(image if image.size == size else image.resize(size, Image.Resampling.BICUBIC))


def _normalized(pixels: np.ndarray, settings: Settings) -> np.ndarray:
    """float32 of [..., 3] uint8: a lookup a channel, which is exact and reads every value once."""
    mean, std = settings.get("image_mean") or [0.5] * 3, settings.get("image_std") or [0.5] * 3
    factor = float(settings.get("rescale_factor") or 1 / 255)
    values = np.arange(256, dtype=np.float64)[:, None] * factor
    table = ((values - np.asarray(mean)) / np.asarray(std)).astype(np.float32)
    result = np.empty(pixels.shape, np.float32)
    for channel in range(3):
        result[..., channel] = table[:, channel][pixels[..., channel]]
    return result
