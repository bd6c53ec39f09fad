"""Pictures and videos of GLM-4.6V, whose encoder is `glm4v`'s. The files of the checkpoint tell the two apart."""

from __future__ import annotations

import math

from sglang.srt.towers.glm4v.processor import FRAME_MARKS, VIDEO
from sglang.srt.towers.pictures.frames import by_interval, each_frame
from sglang.srt.towers.pictures.merged import merged_images
from sglang.srt.towers.pictures.patches import Settings
from sglang.srt.towers.pictures.processor import Processor, one_view
from sglang.srt.towers.pictures.video import Video
from sglang.srt.towers.pictures.video_processor import VideoForm

_RATES = ((30, 3.0), (300, 1.0), (math.inf, 0.5))
"""Length in seconds of a video up to which the grid has this many frames a second."""
_MAX_SECONDS, _MAX_SAMPLED = 2400, 640


def _by_length(video: Video, settings: Settings) -> list[int]:
    """Selects frames for GLM-4.6V: the longer a video, the fewer frames a second."""
    counted = min(video.num_frames / video.fps, _MAX_SECONDS)
    rate = settings["temporal_patch_size"] * next(rate for seconds, rate in _RATES if counted <= seconds)
    return by_interval(video, rate, min(int(counted * rate), _MAX_SAMPLED))


PROCESSOR = Processor(
    views=one_view(merged_images("glm46v.image_processing_pil_glm46v", "Glm46VImageProcessorPil", counts_frames=True)),
    video=VideoForm(_by_length, each_frame(*FRAME_MARKS, "{:.1f} seconds".format), VIDEO),
    counts_frames=True,
)
