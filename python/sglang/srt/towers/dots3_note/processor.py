"""Pictures and videos of dots3-note, whose patches have one frame."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.errors import UserError
from sglang.srt.towers.pictures.frames import one_run, spread_by_rate
from sglang.srt.towers.pictures.merged import PAIRS, merged_images
from sglang.srt.towers.pictures.patches import CLIP, Settings
from sglang.srt.towers.pictures.processor import Processor, one_view
from sglang.srt.towers.pictures.video_processor import VideoForm

_ONE_FRAME = {"temporal_patch_size": 1}


def _one_frame(config: Mapping[str, Any]) -> Settings:
    return _ONE_FRAME


def _usual(settings: Settings) -> Settings:
    """Returns the settings of a file, which published ones have in a section `vision_config`. Raises UserError for a
    file that leaves the limits or the colours to a class's defaults."""
    section = settings.get("vision_config")
    usual = {**settings, **section} if isinstance(section, Mapping) else settings
    limits = {"min_pixels", "max_pixels"} <= usual.keys() or "size" in usual
    if usual and not (limits and {"image_mean", "image_std"} <= usual.keys()):
        raise UserError(
            "preprocessor_config.json needs min_pixels and max_pixels (or size), image_mean and image_std, by "
            "themselves or in vision_config: images would be prepared otherwise than for training."
        )
    return usual


_VIDEO = {"min_frames": 4, "min_pixels": 128 * 28 * 28, "max_pixels": 28 * 28 * 768}


PROCESSOR = Processor(
    views=one_view(merged_images("qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil")),
    video=VideoForm(spread_by_rate, one_run, {**PAIRS, **CLIP, **_VIDEO, **_ONE_FRAME}),
    usual=_usual,
    of_config=_one_frame,
)
