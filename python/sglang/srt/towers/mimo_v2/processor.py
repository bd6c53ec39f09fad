"""Pictures and videos of MiMo-V2.5 and V2.6."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sglang.srt.towers.pictures.frames import each_frame
from sglang.srt.towers.pictures.merged import PAIRS, merged_images
from sglang.srt.towers.pictures.patches import Settings
from sglang.srt.towers.pictures.processor import Processor, one_view
from sglang.srt.towers.pictures.video import Video
from sglang.srt.towers.pictures.video_processor import VideoForm

_START, _END = "<|mimo_video_start|>", "<|mimo_video_end|>"
_COLOURS = {"image_mean": (0.485, 0.456, 0.406), "image_std": (0.229, 0.224, 0.225)}
"""Of ImageNet, whatever a file beside the weights says: the publisher's processor reads none."""
_IMAGE = {**_COLOURS, "patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
_LIMITS = {"min_pixels": 8192, "max_pixels": 1 << 23, "max_pixels_of_all": 1 << 28}
_OF_IMAGES = {"image_min_pixels": "min_pixels", "image_max_pixels": "max_pixels"}
_OF_VIDEOS = {
    "fps": "fps",
    "min_frames": "min_frames",
    "max_frames": "max_frames",
    "video_total_max_pixels": "max_pixels_of_all",
}


def _published(config: Mapping[str, Any]) -> Mapping[str, Any]:
    keys = config.get("processor_config")
    return keys if isinstance(keys, Mapping) else {}


def _of_images(config: Mapping[str, Any]) -> Settings:
    """Returns the settings of images of a config.json, for checkpoints without a file of them."""
    keys = _published(config)
    return {**_IMAGE, **{name: keys[key] for key, name in _OF_IMAGES.items() if keys.get(key)}} if keys else {}


def _of_videos(config: Mapping[str, Any]) -> Settings:
    """Returns the settings of videos of a config.json, which has them beside those of images, and the colours."""
    keys = _published(config)
    return {name: keys[key] for key, name in _OF_VIDEOS.items() if keys.get(key)} | _COLOURS


def _with_colours(settings: Settings) -> Settings:
    return {**settings, **_COLOURS} if settings else settings


def _spread(video: Video, settings: Settings) -> list[int]:
    """Selects `fps` frames a second, a whole number of pairs, from the first to the last."""
    total, together = video.num_frames, settings["temporal_patch_size"]
    wanted = max(total / video.fps * settings["fps"], settings["min_frames"])
    count = int(min(wanted, settings["max_frames"], total)) // together * together
    indices: list[int] = np.unique(np.linspace(0, total - 1, max(1, count), dtype=np.int64)).tolist()
    return indices


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"


_FRAMES = each_frame("{}<|vision_start|>", "<|vision_end|>", _clock)


def _written(times: Sequence[float], tokens: int) -> list[str | int]:
    """Writes the minute and second of each pair of frames before its run."""
    first, *others, last = _FRAMES(times, tokens)
    return [f"{_START}{first}", *others, f"{last}{_END}"]


PROCESSOR = Processor(
    views=one_view(merged_images("qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil")),
    video=VideoForm(_spread, _written, {**PAIRS, **_IMAGE, **_LIMITS, "fps": 1.0, "min_frames": 8, "max_frames": 3600}),
    usual=_with_colours,
    keys=_of_images,
    of_config=_of_videos,
)
