"""Pictures and videos of GLM-4.1V and GLM-4.5V."""

from __future__ import annotations

import math

import numpy as np

from sglang.srt.towers.pictures.frames import each_frame, whole_pairs
from sglang.srt.towers.pictures.merged import PAIRS, merged_images
from sglang.srt.towers.pictures.patches import CLIP, Settings
from sglang.srt.towers.pictures.processor import Processor, one_view
from sglang.srt.towers.pictures.video import Video
from sglang.srt.towers.pictures.video_processor import VideoForm


def _rounded_up(video: Video, settings: Settings) -> list[int]:
    """Selects frames for GLM-4.1V and 4.5V: the one after every 1 / `fps` seconds; a video longer than `max_duration`
    seconds gets as many as one of that length."""
    rate, duration, last = settings["fps"], video.num_frames / video.fps, video.num_frames - 1
    if duration <= settings["max_duration"]:
        times = [i / rate for i in range(max(math.floor(duration * rate), 1))]
    elif int(settings["max_duration"] * rate) >= video.num_frames:
        times = [i / video.fps for i in range(video.num_frames)]
    else:
        times = np.linspace(0, duration, int(settings["max_duration"] * rate)).tolist()
    return whole_pairs([min(last, math.ceil(round(time * video.fps, 6))) for time in times])


VIDEO = {**PAIRS, **CLIP, "min_pixels": 112**2, "max_pixels": 28 * 28 * 2 * 30000, "max_duration": 300}
FRAME_MARKS = ("<|begin_of_image|>", "<|end_of_image|>{}")


PROCESSOR = Processor(
    views=one_view(merged_images("glm4v.image_processing_pil_glm4v", "Glm4vImageProcessorPil", counts_frames=True)),
    video=VideoForm(_rounded_up, each_frame(*FRAME_MARKS, lambda time: str(int(time))), VIDEO),
    counts_frames=True,
    other_classes={"Glm46V": "glm46v"},
)
