"""Pictures and videos of Qwen3-VL, Qwen3.5 and later."""

from __future__ import annotations

import numpy as np

from sglang.srt.towers.pictures.frames import each_frame
from sglang.srt.towers.pictures.merged import PAIRS, merged_images
from sglang.srt.towers.pictures.patches import Settings
from sglang.srt.towers.pictures.processor import Processor, one_view
from sglang.srt.towers.pictures.video import Video
from sglang.srt.towers.pictures.video_processor import VideoForm


def _spread_by_rate(video: Video, settings: Settings) -> list[int]:
    """Selects frames for Qwen3-VL: `fps` frames a second, from the first to the last."""
    wanted = int(video.num_frames / video.fps * settings["fps"])
    count = min(max(wanted, settings["min_frames"]), settings["max_frames"], video.num_frames)
    return [int(index) for index in np.linspace(0, video.num_frames - 1, count).round()]


_VIDEO = {
    "image_mean": (0.5,) * 3,
    "image_std": (0.5,) * 3,
    "patch_size": 16,
    "min_frames": 4,
    "min_pixels": 128 * 32 * 32,
    "max_pixels": 32 * 32 * 768,
}


PROCESSOR = Processor(
    views=one_view(merged_images("qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil")),
    video=VideoForm(
        _spread_by_rate,
        each_frame("<{} seconds><|vision_start|>", "<|vision_end|>", "{:.1f}".format),
        {**PAIRS, **_VIDEO},
        middle=True,
    ),
)
