"""Pictures to the patches that a model's encoder takes, as the files of the model say.

Images go through the classes of transformers that work on numpy arrays, without torch and torchvision. It has no such
class for the images of Kimi K2.5, which are computed here from the same settings; videos are in `video_processors`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

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
            return Patches(result["pixel_values"], (frames, rows, columns), tokens)

        return process

    return make


def _pooled(settings: Settings) -> ImageProcessor:
    """Gemma 4: patches row by row, pooled to tokens by the encoder."""
    processor = _transformers_class("gemma4.image_processing_pil_gemma4", "Gemma4ImageProcessorPil", settings)

    def process(image: Image.Image) -> Patches:
        result = processor(image, return_tensors="np")
        tokens = int(result["num_soft_tokens_per_image"][0])
        count = tokens * processor.pooling_kernel_size**2
        positions = np.asarray(result["image_position_ids"][0][:count], np.int32)
        columns, rows = (int(size) + 1 for size in positions.max(0))
        return Patches(result["pixel_values"][0][:count], (1, rows, columns), tokens)

    return process


def _native_size(settings: Settings) -> ImageProcessor:
    """Kimi K2.5: a picture is never enlarged; black is added below and to the right up to whole squares of patches."""
    most = int(settings.get("max_patches", 16384))

    def process(image: Image.Image) -> Patches:
        return padded_patches(resized(image, never_enlarged(image.size, settings, most)), settings)

    return process


def never_enlarged(size: tuple[int, int], settings: Settings, most: int) -> tuple[int, int]:
    """Returns the width and the height of at most `most` patches and a limit for each side."""
    patch, (width, height) = int(settings.get("patch_size", 14)), size
    side = int(_size(settings).get("max_height", 512)) * patch
    fitting = max(1, width // patch) * max(1, height // patch)
    scale = min(1.0, math.sqrt(most / fitting), side / width, side / height)
    return min(side, max(1, int(width * scale))), min(side, max(1, int(height * scale)))


def padded_patches(picture: np.ndarray, settings: Settings) -> Patches:
    """picture [height, width, 3] uint8. Patches row by row, with black up to whole squares of the merge."""
    patch, merge = int(settings.get("patch_size", 14)), int(settings.get("merge_size", 2))
    factor, (height, width) = patch * merge, picture.shape[:2]
    canvas = np.zeros((-(-height // factor) * factor, -(-width // factor) * factor, 3), np.uint8)
    canvas[:height, :width] = picture
    rows, columns = canvas.shape[0] // patch, canvas.shape[1] // patch
    values = normalized(canvas, settings).reshape(rows, patch, columns, patch, 3)
    pixels = values.transpose(0, 2, 4, 1, 3).reshape(rows * columns, -1)
    return Patches(np.ascontiguousarray(pixels), (1, rows, columns), rows * columns // merge**2)


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


def edges(settings: Settings) -> dict[str, Any]:
    """`min_pixels` and `max_pixels`, which `size` may have as its two edges."""
    size = _size(settings)
    return {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")}


def _size(settings: Settings) -> Mapping[str, Any]:
    size = settings.get("size")
    return size if isinstance(size, Mapping) else {}


def resized(image: Image.Image, size: tuple[int, int]) -> np.ndarray:
    """[height, width, 3] uint8."""
    return np.asarray(image if image.size == size else image.resize(size, Image.Resampling.BICUBIC))


def normalized(pixels: np.ndarray, settings: Settings) -> np.ndarray:
    """float32 of [..., 3] uint8: a lookup a channel, which is exact and reads every value once."""
    mean, std = settings.get("image_mean") or [0.5] * 3, settings.get("image_std") or [0.5] * 3
    factor = float(settings.get("rescale_factor") or 1 / 255)
    values = np.arange(256, dtype=np.float64)[:, None] * factor
    table = ((values - np.asarray(mean)) / np.asarray(std)).astype(np.float32)
    result = np.empty(pixels.shape, np.float32)
    for channel in range(3):
        result[..., channel] = table[:, channel][pixels[..., channel]]
    return result
