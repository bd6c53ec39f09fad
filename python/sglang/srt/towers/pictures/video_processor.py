"""Converts videos to the patches that an encoder takes, and to their parts of the prompt.

transformers has these computations for torchvision alone; here and in the folders of the towers they are written with
numpy and Pillow, from the same settings. Source: the video processors of transformers 5.17.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from sglang.srt.towers.pictures.merged import merged_patches, merged_size
from sglang.srt.towers.pictures.patches import Patches, Settings, edges, padded, resized
from sglang.srt.towers.pictures.video import MediaError, Video


@dataclass(frozen=True, slots=True)
class VideoPatches:
    """`times`: seconds of each frame of the grid. `parts`: prompt text; a number stands for a run of that many
    placeholders. `frame_seconds`: time between two frames of the grid, for models whose positions count it."""

    patches: Patches
    times: list[float]
    parts: list[str | int]
    frame_seconds: float = 0.0


Written = Callable[[Sequence[float], int], list[str | int]]
"""Takes the times of the grid's frames and the placeholders of one (or of one pool) and returns the prompt parts."""


@dataclass(frozen=True, slots=True)
class VideoForm:
    """How a family reads videos. `defaults`: settings that a model's files may leave out. `middle`: a temporal patch
    gets the mean time of its frames, otherwise the time of the first. `pooled`: grid frames that share the placeholders
    of one; if the last pool has fewer, no frame is repeated. `padding`: size up to which frames get black
    below and right; None: `size`."""

    frames: Callable[[Video, Settings], list[int]]
    written: Written
    defaults: Mapping[str, object]
    size: Callable[[Video, int, Settings], tuple[int, int]] = merged_size
    patches: Callable[[np.ndarray, Settings], Patches] = merged_patches
    middle: bool = False
    pooled: int = 1
    padding: Callable[[Video, int, Settings], tuple[int, int]] | None = None
    resample: Image.Resampling = Image.Resampling.BICUBIC


class VideoProcessor:
    """Converts a model's videos to patches and prompt parts."""

    def __init__(self, form: VideoForm, settings: Settings) -> None:
        given = {**settings, **edges(settings)}
        self._form = form
        self._settings = {**form.defaults, **{key: value for key, value in given.items() if value is not None}}

    def __call__(self, video: Video) -> VideoPatches:
        form, settings = self._form, self._settings
        indices = self._indices(video)
        size = form.size(video, len(indices), settings)
        padding = None if form.padding is None else form.padding(video, len(indices), settings)
        frames = [resized(frame, size, form.resample) for frame in _repeated(video, indices)]
        together = settings["temporal_patch_size"] if form.pooled == 1 else 1
        missing = -len(frames) % together
        frames += frames[-1:] * missing
        indices += indices[-1:] * missing
        firsts, lasts = indices[::together], indices[together - 1 :: together]
        lasts = lasts if form.middle else firsts
        times = [(first + last) / 2 / video.fps for first, last in zip(firsts, lasts, strict=True)]
        pictures = np.stack(frames)
        patches = form.patches(pictures if padding is None else padded(pictures, padding), settings)
        sampled_fps = len(indices) / video.num_frames * video.fps
        parts = form.written(times, patches.num_tokens // -(-len(times) // form.pooled))
        return VideoPatches(patches, times, parts, together / sampled_fps)

    def _indices(self, video: Video) -> list[int]:
        if not video.is_sampled:
            return self._form.frames(video, self._settings)
        maximum = self._settings["max_frames"]
        if video.num_frames > maximum:
            raise MediaError(f"a video has {video.num_frames} frames; the model takes {maximum}")
        return list(range(video.num_frames))


def _repeated(video: Video, indices: Sequence[int]) -> Iterator[Image.Image]:
    """Yields the frames at non-descending indices; each is decoded once."""
    decoded = video.frames(list(dict.fromkeys(indices)))
    last, frame = -1, None
    for index in indices:
        if index != last:
            last, frame = index, next(decoded)
        assert frame is not None
        yield frame
