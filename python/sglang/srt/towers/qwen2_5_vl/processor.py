"""Pictures and videos of Qwen2.5-VL."""

from __future__ import annotations

import math

from sglang.srt.towers.pictures.frames import one_run, steps
from sglang.srt.towers.pictures.merged import PAIRS, merged_images
from sglang.srt.towers.pictures.patches import CLIP, Settings
from sglang.srt.towers.pictures.processor import Processor, one_view
from sglang.srt.towers.pictures.video import Video
from sglang.srt.towers.pictures.video_processor import VideoForm


def _steps_by_rate(video: Video, settings: Settings) -> list[int]:
    """Selects frames for Qwen2.5-VL: as many pairs as `fps` gives, in equal steps from the first on."""
    together, total = settings["temporal_patch_size"], video.num_frames
    maximum = min(settings["max_frames"], total) // together * together
    count = min(max(total / video.fps * settings["fps"], settings["min_frames"]), maximum, total)
    return steps(total, max(1, math.floor(count / together) * together))


_VIDEO = {
    "min_frames": 4,
    "min_pixels": 128 * 28 * 28,
    "max_pixels": 28 * 28 * 768,
    "max_pixels_of_all": int(0.9 * 128000 * 28 * 28),
}


PROCESSOR = Processor(
    views=one_view(merged_images("qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil")),
    video=VideoForm(_steps_by_rate, one_run, {**PAIRS, **CLIP, **_VIDEO}),
)
