"""Patches of pictures, and arithmetic that processors share.

A pixel's channel has 256 levels, so the normalized value of each level is computed once and looked up: the same values,
in the encoder's type, in a quarter of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

Settings = Mapping[str, Any]
CLIP = {
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
    "patch_size": 14,
}


@dataclass(frozen=True, slots=True)
class Patches:
    """`pixels` [patches, values a patch], of images in the requested type, of videos float32; `grid`: frames, rows and
    columns of patches."""

    pixels: np.ndarray
    grid: tuple[int, int, int]
    num_tokens: int
    """Number of placeholders."""


ImageProcessor = Callable[[Image.Image], Patches]
MakePatches = Callable[[Settings, str], ImageProcessor]
"""Takes the settings of images and the type of patches that `patch_types.as_type` names."""


def cut(
    picture: np.ndarray, levels: np.ndarray, patch: int, merge: int, frames: int = 1, colours_first: bool = True
) -> np.ndarray:
    """Cuts a picture [rows, columns, 3] uint8, of whole squares of merge x merge patches, with levels [3, 256]. Returns
    [patches, 3 * frames * patch * patch] of the type of the levels: the patches of a square one after the other, each
    with its pixels `frames` times. colours_first: the values of a colour are contiguous for all frames, instead of
    those of a frame for all colours.

    A row of squares at a time stays in the caches of a core, and a line of a patch is copied as one element.
    """
    line, side = np.dtype((np.void, patch * levels.itemsize)), patch * merge
    rows, columns = picture.shape[0] // side, picture.shape[1] // side
    planes = (3, frames) if colours_first else (frames, 3)
    result = np.empty((rows, columns, merge, merge, *planes, patch), line)
    by_colour = result if colours_first else result.swapaxes(4, 5)
    for row, squares in zip(picture.reshape(rows, side, -1, 3), by_colour, strict=True):
        for channel in range(3):
            lines = levels[channel].take(row[..., channel]).view(line).reshape(merge, patch, columns, merge)
            for frame in range(frames):
                squares[..., channel, frame, :] = lines.transpose(2, 0, 3, 1)
    return result.view(levels.dtype).reshape(rows * columns * merge**2, -1)


def levels_of(settings: Settings, levels: range = range(256)) -> np.ndarray:
    """Returns the normalized values of the levels of each channel, [3, 256] float32 for all levels."""
    mean, std = settings.get("image_mean") or [0.5] * 3, settings.get("image_std") or [0.5] * 3
    values = np.array(levels, np.float64)[:, None] * float(settings.get("rescale_factor") or 1 / 255)
    return np.ascontiguousarray(((values - np.asarray(mean)) / np.asarray(std)).astype(np.float32).T)


def normalized(pixels: np.ndarray, settings: Settings) -> np.ndarray:
    """Converts [..., 3] uint8 to float32 by a lookup a channel, which is exact and reads every value once."""
    result = np.empty(pixels.shape, np.float32)
    for channel, levels in enumerate(levels_of(settings)):
        result[..., channel] = levels[pixels[..., channel]]
    return result


def resized(
    image: Image.Image, size: tuple[int, int], resample: Image.Resampling = Image.Resampling.BICUBIC
) -> np.ndarray:
    """Returns the resized image, [height, width, 3] uint8."""
    return np.asarray(image if image.size == size else image.resize(size, resample))


def padded(pictures: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Adds black below and right of pictures [N, height, width, 3] uint8 up to this width and height."""
    result = np.zeros((len(pictures), size[1], size[0], 3), np.uint8)
    result[:, : pictures.shape[1], : pictures.shape[2]] = pictures
    return result


def given(settings: Settings) -> dict[str, Any]:
    """Returns the settings that are not None."""
    return {key: value for key, value in settings.items() if value is not None}


def size_of(settings: Settings) -> Mapping[str, Any]:
    """Returns the settings of `size`, if it has several."""
    size = settings.get("size")
    return size if isinstance(size, Mapping) else {}


def edges(settings: Settings) -> dict[str, Any]:
    """Returns `min_pixels` and `max_pixels`, which may also be given as the two edges of `size`."""
    size = size_of(settings)
    return {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")}
