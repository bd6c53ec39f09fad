"""Which frames of a video an encoder sees, and how the prompt shows them: what several models share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from sglang.srt.towers.pictures.patches import Settings
from sglang.srt.towers.pictures.video import Video
from sglang.srt.towers.pictures.video_processor import Written


def each_frame(before: str, after: str, time_format: Callable[[float], str]) -> Written:
    """Writes a run for each frame, between texts with its time in place of `{}`."""

    def written(times: Sequence[float], tokens: int) -> list[str | int]:
        parts: list[str | int] = []
        for time in map(time_format, times):
            parts += [before.format(time), tokens, after.format(time)]
        return parts

    return written


def steps(total: int, count: int) -> list[int]:
    """Returns `count` of `total` frames, in equal steps from the first on."""
    return [int(index) for index in (np.arange(count) * (total / count)).astype(int)]


def spread_by_rate(video: Video, settings: Settings) -> list[int]:
    """Selects `fps` frames a second, from the first to the last."""
    wanted = int(video.num_frames / video.fps * settings["fps"])
    count = min(max(wanted, settings["min_frames"]), settings["max_frames"], video.num_frames)
    return [int(index) for index in np.linspace(0, video.num_frames - 1, count).round()]


def one_run(times: Sequence[float], tokens: int) -> list[str | int]:
    """Writes one run for all frames."""
    return [len(times) * tokens]


def by_interval(video: Video, rate: float, count: int) -> list[int]:
    """Returns the first frame of every 1 / `rate` seconds; if these are not `count`, `count` frames in equal steps."""
    total, duration = video.num_frames, video.num_frames / video.fps
    indices: list[int] = []
    if total >= count:
        step, due = 1 / rate, 0.0
        for index in range(total):
            if index / video.fps >= due:
                due += step
                indices.append(index)
                if due >= int(duration):
                    break
    if len(indices) != count:
        first, last = (indices[0], indices[-1]) if 0 < len(indices) < count else (0, total - 1)
        indices = np.linspace(first, last, max(1, count), dtype=int).tolist()
    return whole_pairs(indices)


def whole_pairs(indices: Sequence[int]) -> list[int]:
    """Returns each frame once, and the last one twice if their number is odd."""
    unique = list(dict.fromkeys(indices))
    return unique + unique[-1:] * (len(unique) % 2)
