"""Converts pictures to the patches that a model's encoder takes, by the settings in the model's files.

Sizes and values are those of the classes of transformers that work on numpy arrays, without torch and torchvision. A
pixel's channel has 256 levels, so the class's result for each level is computed once and looked up: the same values, in
the encoder's type, in a quarter of the time. transformers has no such class for the images of Kimi K2.5, MiniMax-M3,
Muse-Glimmer, Inkling and DeepSeek-V4.1, which are computed here from the same settings; tiles are in `tiles` and
`canvas_tiles`, videos in `video_processors`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from sglang.srt.managers.front.media import canvas
from sglang.srt.managers.front.media.decoding import MediaError
from sglang.srt.managers.front.media.patch_types import as_type
from sglang.srt.managers.front.media.pixel_budget import nearest_shape, within, within_rows_of_tokens
from sglang.srt.managers.front.media.processor_files import ProcessorFiles
from sglang.srt.plan.media import PATCHES_A_STEP

Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Patches:
    """`pixels` [patches, values a patch], of images in the requested type, of videos float32; `grid`: frames, rows and
    columns of patches."""

    pixels: np.ndarray
    grid: tuple[int, int, int]
    num_tokens: int
    """Number of placeholders."""


ImageProcessor = Callable[[Image.Image], Patches]


def image_processor(files: ProcessorFiles, dtype: str = "float32") -> ImageProcessor:
    """Returns the processor of the model's images, with patches of a type that `patch_types.as_type` names."""
    return _IMAGES[files.family](files.image, dtype)


def _transformers_class(module: str, name: str, settings: Settings) -> Any:
    kind = getattr(importlib.import_module(f"transformers.models.{module}"), name)
    return kind.from_dict(dict(settings))


_Make = Callable[[Settings, str], ImageProcessor]


def _merged(module: str, name: str, counts_frames: bool = False) -> _Make:
    """Makes a processor for encoders that merge squares of patches: one grid, and a token a square. counts_frames:
    limits apply to the pixels of all frames that a patch has."""

    def make(settings: Settings, dtype: str) -> ImageProcessor:
        processor = _transformers_class(module, name, settings)
        fitted = importlib.import_module(f"transformers.models.{module}").smart_resize
        patch, merge, frames = processor.patch_size, processor.merge_size, processor.temporal_patch_size
        limits = {"min_pixels": processor.size["shortest_edge"], "max_pixels": processor.size["longest_edge"]}
        limits |= {"num_frames": frames, "temporal_factor": frames} if counts_frames else {}
        levels = as_type(_levels(processor), dtype)

        def process(image: Image.Image) -> Patches:
            if processor.do_resize:
                height, width = fitted(height=image.height, width=image.width, factor=patch * merge, **limits)
                image = image if image.size == (width, height) else image.resize((width, height), processor.resample)
            pixels = cut(np.asarray(image), levels, patch, merge, frames)
            rows, columns = image.height // patch, image.width // patch
            return Patches(pixels, (1, rows, columns), rows * columns // merge**2)

        return process

    return make


def _on_a_canvas(settings: Settings, dtype: str) -> ImageProcessor:
    """Makes GLM-5.3-Flash's processor: a picture keeps its aspect ratio, and black is added up to whole squares of
    patches."""
    processor = _transformers_class("glm5_next.image_processing_pil_glm5_next", "Glm5NextImageProcessorPil", settings)
    words = {name: getattr(processor, name) for name in canvas.KEYS}
    patch, merge, frames = processor.patch_size, processor.merge_size, processor.temporal_patch_size
    levels = as_type(_levels(processor), dtype)

    def process(image: Image.Image) -> Patches:
        size = canvas.fitted(image.size, frames, words)
        image = image if image.size == size.content else image.resize(size.content, processor.resample)
        (picture,) = size.around(np.asarray(image)[None])
        rows, columns = picture.shape[0] // patch, picture.shape[1] // patch
        return Patches(cut(picture, levels, patch, merge, frames), (1, rows, columns), rows * columns // merge**2)

    return process


def _levels(processor: Any) -> np.ndarray:
    """Returns the values that a class of transformers computes for the levels of each channel, [3, 256] float32."""
    values = np.broadcast_to(np.arange(256, dtype=np.uint8), (3, 1, 256))
    if processor.do_rescale:
        values = processor.rescale(values, processor.rescale_factor)
    if processor.do_normalize:
        values = processor.normalize(values, processor.image_mean, processor.image_std)
    return np.asarray(values, np.float32)[:, 0]


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


def _pooled(settings: Settings, dtype: str) -> ImageProcessor:
    """Makes Gemma 4's processor: patches row by row, which the encoder pools to tokens."""
    processor = _transformers_class("gemma4.image_processing_pil_gemma4", "Gemma4ImageProcessorPil", settings)

    def process(image: Image.Image) -> Patches:
        result = processor(image, return_tensors="np")
        tokens = int(result["num_soft_tokens_per_image"][0])
        count = tokens * processor.pooling_kernel_size**2
        positions = np.asarray(result["image_position_ids"][0][:count], np.int32)
        columns, rows = (int(size) + 1 for size in positions.max(0))
        return Patches(as_type(result["pixel_values"][0][:count], dtype), (1, rows, columns), tokens)

    return process


def _native_size(settings: Settings, dtype: str) -> ImageProcessor:
    """Makes Kimi K2.5's processor: a picture is never enlarged; black is added below and right up to whole squares of
    patches."""
    maximum = int(settings.get("max_patches", 16384))

    def process(image: Image.Image) -> Patches:
        return padded_patches(resized(image, never_enlarged(image.size, settings, maximum)), settings, dtype)

    return process


def never_enlarged(size: tuple[int, int], settings: Settings, maximum: int) -> tuple[int, int]:
    """Returns the width and height within `maximum` patches and the limit of each side."""
    patch, (width, height) = int(settings.get("patch_size", 14)), size
    side = int(_size(settings).get("max_height", 512)) * patch
    fitting = max(1, width // patch) * max(1, height // patch)
    scale = min(1.0, math.sqrt(maximum / fitting), side / width, side / height)
    return min(side, max(1, int(width * scale))), min(side, max(1, int(height * scale)))


def padded_patches(picture: np.ndarray, settings: Settings, dtype: str = "float32") -> Patches:
    """Converts a picture [height, width, 3] uint8 to patches row by row, with black up to whole squares of the
    merge."""
    patch, merge = int(settings.get("patch_size", 14)), int(settings.get("merge_size", 2))
    factor, (height, width) = patch * merge, picture.shape[:2]
    canvas = np.zeros((-(-height // factor) * factor, -(-width // factor) * factor, 3), np.uint8)
    canvas[:height, :width] = picture
    rows, columns = canvas.shape[0] // patch, canvas.shape[1] // patch
    pixels = cut(canvas, as_type(levels_of(settings), dtype), patch, merge=1)
    return Patches(pixels, (1, rows, columns), rows * columns // merge**2)


OF_CLIP = {
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
    "patch_size": 14,
}
OF_M3 = {**OF_CLIP, "merge_size": 2, "temporal_patch_size": 2}


def _within_a_budget(settings: Settings, dtype: str) -> ImageProcessor:
    """Makes MiniMax-M3's processor: the nearest whole squares of patches whose pixels are within two limits. The `size`
    in published files is not used."""
    words = {**OF_M3, **given(settings)}
    patch, merge, frames = (int(words[key]) for key in ("patch_size", "merge_size", "temporal_patch_size"))
    limits = {"shortest_edge": 4 * 28**2, "longest_edge": 672**2, **_size(settings)}
    minimum, maximum = limits["shortest_edge"], min(limits["longest_edge"], PATCHES_A_STEP * patch**2)
    levels = as_type(levels_of(words), dtype)

    def process(image: Image.Image) -> Patches:
        picture = resized(image, within(image.size, patch * merge, minimum, maximum))
        rows, columns = picture.shape[0] // patch, picture.shape[1] // patch
        return Patches(cut(picture, levels, patch, merge, frames), (1, rows, columns), rows * columns // merge**2)

    return process


OF_MUSE = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}


def _nearest_shape_processor(settings: Settings, dtype: str) -> ImageProcessor:
    """Makes Muse-Glimmer's processor: patches row by row, with the colours of a frame together."""
    words = {**OF_MUSE, "max_image_tokens": 4096, **given(settings)}
    patch, merge, frames = (int(words[key]) for key in ("patch_size", "merge_size", "temporal_patch_size"))
    maximum, levels = min(int(words["max_image_tokens"]), PATCHES_A_STEP // merge**2), as_type(levels_of(words), dtype)

    def process(image: Image.Image) -> Patches:
        picture = resized(image, nearest_shape(image.size, patch * merge, maximum), Image.Resampling.LANCZOS)
        rows, columns = picture.shape[0] // patch, picture.shape[1] // patch
        pixels = cut(picture, levels, patch, 1, frames, colours_first=False)
        return Patches(pixels, (1, rows, columns), rows * columns // merge**2)

    return process


OF_INKLING = {
    "image_mean": OF_CLIP["image_mean"],
    "image_std": OF_CLIP["image_std"],
    "rescale_image_max_upscaled_long_edge": 2048,
}
_INKLING_SIDE, _INKLING_FRAMES = 40, 2


def _beyond_the_edges(settings: Settings, dtype: str) -> ImageProcessor:
    """Makes Inkling's processor: patches row by row, with the colours of a pixel together. In the last row and column,
    pixels beyond the picture have the level below black. There is one column more than the picture has whole ones."""
    words = {**OF_INKLING, **given(settings)}
    side = int(_size(words).get("height", _INKLING_SIDE))
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
        whole = np.repeat(boxes, _INKLING_FRAMES, axis=1).reshape(rows * columns, -1)
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


def _in_rows(settings: Settings, dtype: str) -> ImageProcessor:
    """Makes DeepSeek-V4.1's processor: patches row by row of a picture that keeps its aspect ratio, with grey on both
    sides up to whole patches. In settings that transformers wrote, `size` has the fewest pixels and the most tokens."""
    words, limits = given(settings), {"shortest_edge": 544**2, "longest_edge": 1024, **_size(settings)}
    patch, merge = int(words.get("patch_size", 14)), int(words.get("downsample_ratio", 3))
    tokens = words.get("max_image_tokens", limits["longest_edge"])
    minimum, maximum = words.get("min_pixels", limits["shortest_edge"]), min(tokens, PATCHES_A_STEP // merge**2)
    longest, levels = words.get("max_wh_ratio"), as_type(levels_of(words), dtype)

    def process(image: Image.Image) -> Patches:
        size = within_rows_of_tokens(image.size, patch, merge, minimum, maximum, longest)
        if longest is not None and image.width >= longest * image.height:
            picture = image.resize(size)
        else:
            picture = ImageOps.pad(image, size, color=_GREY)
        rows, columns = size[1] // patch, size[0] // patch
        num_tokens = -(-rows // merge) * (-(-columns // merge) + 1) + 2
        return Patches(cut(np.asarray(picture), levels, patch, merge=1), (1, rows, columns), num_tokens)

    return process


_GREY = (127, 127, 127)
_QWEN = _merged("qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil")
_IMAGES: Mapping[str, _Make] = {
    "qwen3_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "glm4v": _merged("glm4v.image_processing_pil_glm4v", "Glm4vImageProcessorPil", counts_frames=True),
    "glm46v": _merged("glm46v.image_processing_pil_glm46v", "Glm46VImageProcessorPil", counts_frames=True),
    "glm5_next": _on_a_canvas,
    "gemma4": _pooled,
    "kimi_k25": _native_size,
    "minimax_m3": _within_a_budget,
    "muse_glimmer": _nearest_shape_processor,
    "inkling": _beyond_the_edges,
    "deepseek_v41": _in_rows,
}
FAMILIES = tuple(_IMAGES)


def edges(settings: Settings) -> dict[str, Any]:
    """Returns `min_pixels` and `max_pixels`, which may also be given as the two edges of `size`."""
    size = _size(settings)
    return {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")}


def _size(settings: Settings) -> Mapping[str, Any]:
    size = settings.get("size")
    return size if isinstance(size, Mapping) else {}


def given(settings: Settings) -> dict[str, Any]:
    """Returns the settings that are not None."""
    return {key: value for key, value in settings.items() if value is not None}


def resized(
    image: Image.Image, size: tuple[int, int], resample: Image.Resampling = Image.Resampling.BICUBIC
) -> np.ndarray:
    """Returns the resized image, [height, width, 3] uint8."""
    return np.asarray(image if image.size == size else image.resize(size, resample))


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
