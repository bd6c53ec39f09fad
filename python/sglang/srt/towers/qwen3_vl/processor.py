"""Pictures and videos of Qwen3-VL, Qwen3.5 and later."""

from __future__ import annotations

from sglang.srt.towers.pictures.frames import each_frame, spread_by_rate
from sglang.srt.towers.pictures.merged import PAIRS, merged_images
from sglang.srt.towers.pictures.processor import Processor, one_view
from sglang.srt.towers.pictures.video_processor import VideoForm

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
        spread_by_rate,
        each_frame("<{} seconds><|vision_start|>", "<|vision_end|>", "{:.1f}".format),
        {**PAIRS, **_VIDEO},
        middle=True,
    ),
)
