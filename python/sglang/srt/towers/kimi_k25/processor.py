"""Pictures and videos of Kimi K2.5, which are never enlarged; black is added up to whole squares of patches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image

from sglang.srt.errors import UserError
from sglang.srt.plan.media import PATCHES_A_STEP
from sglang.srt.towers.pictures.frames import steps
from sglang.srt.towers.pictures.patch_types import as_type
from sglang.srt.towers.pictures.patches import ImageProcessor, Patches, Settings, cut, levels_of, resized, size_of
from sglang.srt.towers.pictures.processor import Processor, one_view
from sglang.srt.towers.pictures.video import Video
from sglang.srt.towers.pictures.video_processor import VideoForm

_CLIP_FRAMES = 4
"""Frames that attend to one another, and are pooled."""
_PUBLISHED = "media_proc_cfg"


def _native_size(settings: Settings, dtype: str) -> ImageProcessor:
    """Makes Kimi K2.5's processor: a picture is never enlarged; black is added below and right up to whole squares of
    patches."""
    maximum = int(settings.get("max_patches", 16384))

    def process(image: Image.Image) -> Patches:
        return _padded_patch_rows(resized(image, _never_enlarged(image.size, settings, maximum)), settings, dtype)

    return process


def _never_enlarged(size: tuple[int, int], settings: Settings, maximum: int) -> tuple[int, int]:
    """Returns the width and height within `maximum` patches and the limit of each side."""
    patch, (width, height) = int(settings.get("patch_size", 14)), size
    side = int(size_of(settings).get("max_height", 512)) * patch
    fitting = max(1, width // patch) * max(1, height // patch)
    scale = min(1.0, math.sqrt(maximum / fitting), side / width, side / height)
    return min(side, max(1, int(width * scale))), min(side, max(1, int(height * scale)))


def _padded_patch_rows(picture: np.ndarray, settings: Settings, dtype: str = "float32") -> Patches:
    """Converts a picture [height, width, 3] uint8 to patches row by row, with black up to whole squares of the
    merge."""
    patch, merge = int(settings.get("patch_size", 14)), int(settings.get("merge_size", 2))
    factor, (height, width) = patch * merge, picture.shape[:2]
    canvas = np.zeros((-(-height // factor) * factor, -(-width // factor) * factor, 3), np.uint8)
    canvas[:height, :width] = picture
    rows, columns = canvas.shape[0] // patch, canvas.shape[1] // patch
    pixels = cut(canvas, as_type(levels_of(settings), dtype), patch, merge=1)
    return Patches(pixels, (1, rows, columns), rows * columns // merge**2)


def _by_rate(video: Video, settings: Settings) -> list[int]:
    """Selects frames for Kimi K2.5: `fps` frames a second (`sample_fps` in published files), in equal steps from the
    first on."""
    count = int(video.num_frames / video.fps * settings.get("fps", settings["sample_fps"]))
    return steps(video.num_frames, min(max(count, 1), video.num_frames, settings["max_frames"]))


def _clips_of_four(times: Sequence[float], tokens: int) -> list[str | int]:
    """Writes Kimi K2.5's parts: the time of the first frame and one run for every four frames, which are pooled to
    one."""
    parts: list[str | int] = []
    for first in times[::_CLIP_FRAMES]:
        seconds, thousandths = divmod(int(first * 1000), 1000)
        clock = f"{seconds // 3600 % 24:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}.{thousandths:03d}"
        parts += [f"{clock}<|media_begin|>video<|media_content|>", tokens, "<|media_end|>"]
    return parts


def _size_without_padding(video: Video, count: int, settings: Settings) -> tuple[int, int]:
    """Returns the size for Kimi K2.5: as for images, with fewer patches; whole squares of patches are filled up with
    black."""
    maximum = settings.get("in_patch_limit_each_frame") or settings.get("max_patches", PATCHES_A_STEP)
    return _never_enlarged(video.size, settings, min(maximum, PATCHES_A_STEP // _CLIP_FRAMES))


def _padded_patches(frames: np.ndarray, settings: Settings) -> Patches:
    """Converts frames [F, height, width, 3] uint8."""
    parts = [_padded_patch_rows(frame, settings) for frame in frames]
    _, rows, columns = parts[0].grid
    pixels = np.concatenate([part.pixels for part in parts])
    return Patches(pixels, (len(parts), rows, columns), sum(part.num_tokens for part in parts[::_CLIP_FRAMES]))


def _usual(settings: Settings) -> Settings:
    """Returns the settings, with the keys of published checkpoints renamed to those of transformers."""
    published = settings.get(_PUBLISHED)
    if not isinstance(published, Mapping) or not published:
        return settings
    if published.get("fixed_output_tokens") is not None:
        raise UserError(
            f"preprocessor_config.json: {_PUBLISHED}.fixed_output_tokens is not supported; "
            "serve text with --language-model-only."
        )
    words = {
        "in_patch_limit": "max_patches",
        "merge_kernel_size": "merge_size",
        "max_num_frames_each_video": "max_frames",
    }
    usual = {words.get(str(name), str(name)): value for name, value in published.items()}
    side = usual.pop("patch_limit_on_one_side", None)
    return usual if side is None else {**usual, "size": {"max_height": side, "max_width": side}}


_VIDEO = {
    "image_mean": (0.5,) * 3,
    "image_std": (0.5,) * 3,
    "patch_size": 14,
    "merge_size": 2,
    "sample_fps": 2.0,
    "max_frames": 2048,
}


PROCESSOR = Processor(
    views=one_view(_native_size),
    video=VideoForm(
        _by_rate, _clips_of_four, _VIDEO, pooled=_CLIP_FRAMES, size=_size_without_padding, patches=_padded_patches
    ),
    usual=_usual,
)
