"""Converts videos to the patches that a model's encoder takes, and to their parts of the prompt.

transformers has these computations for torchvision alone; they are written here with numpy and Pillow, from the same
settings. Source: the video processors of transformers 5.17.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from sglang.srt.managers.front.media.canvas import fitted
from sglang.srt.managers.front.media.decoding import MediaError, Video
from sglang.srt.managers.front.media.pixel_budget import MAX_SCALED_ASPECT, nearest_shape, within
from sglang.srt.managers.front.media.processor_files import ProcessorFiles
from sglang.srt.managers.front.media.processors import (
    OF_CLIP,
    OF_M3,
    OF_MUSE,
    Patches,
    Settings,
    edges,
    never_enlarged,
    normalized,
    padded_patches,
    resized,
)
from sglang.srt.plan.media import PATCHES_A_STEP


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
_CLIP_FRAMES = 4
"""Frames that attend to one another in Kimi K2.5, which pools them, and in MiniMax-M3."""


def _each_frame(before: str, after: str, time_format: Callable[[float], str]) -> Written:
    """Writes a run for each frame, between texts with its time in place of `{}`."""

    def written(times: Sequence[float], tokens: int) -> list[str | int]:
        parts: list[str | int] = []
        for time in map(time_format, times):
            parts += [before.format(time), tokens, after.format(time)]
        return parts

    return written


def _clocks(times: Sequence[float], tokens: int) -> list[str | int]:
    """Writes Gemma 4's parts: minutes and seconds before each frame; its tokenizer has the marks around a run."""
    parts: list[str | int] = []
    for number, time in enumerate(times):
        clock = f"{int(time // 60):02d}:{int(time % 60):02d} "
        parts += [clock if number == 0 else f" {clock}", tokens]
    return parts


def _all_frames(times: Sequence[float], tokens: int) -> list[str | int]:
    return [len(times) * tokens]


def _clips_of_four(times: Sequence[float], tokens: int) -> list[str | int]:
    """Writes Kimi K2.5's parts: the time of the first frame and one run for every four frames, which are pooled to
    one."""
    parts: list[str | int] = []
    for first in times[::_CLIP_FRAMES]:
        seconds, thousandths = divmod(int(first * 1000), 1000)
        clock = f"{seconds // 3600 % 24:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}.{thousandths:03d}"
        parts += [f"{clock}<|media_begin|>video<|media_content|>", tokens, "<|media_end|>"]
    return parts


def _closed_by(start: str, clock: Callable[[float], str], between: str, end: str) -> Written:
    """Writes each frame's time and run, a mark between two frames, and marks around all."""

    def written(times: Sequence[float], tokens: int) -> list[str | int]:
        parts: list[str | int] = []
        for number, time in enumerate(times):
            parts += [(between if number else start) + clock(time), tokens]
        return [*parts, end]

    return written


# --- which frames -----------------------------------------------------------------------------------------------------


def _spread_by_rate(video: Video, settings: Settings) -> list[int]:
    """Selects frames for Qwen3-VL: `fps` frames a second, from the first to the last."""
    wanted = int(video.num_frames / video.fps * settings["fps"])
    count = min(max(wanted, settings["min_frames"]), settings["max_frames"], video.num_frames)
    return [int(index) for index in np.linspace(0, video.num_frames - 1, count).round()]


def _steps_by_rate(video: Video, settings: Settings) -> list[int]:
    """Selects frames for Qwen2.5-VL: as many pairs as `fps` gives, in equal steps from the first on."""
    together, total = settings["temporal_patch_size"], video.num_frames
    maximum = min(settings["max_frames"], total) // together * together
    count = min(max(total / video.fps * settings["fps"], settings["min_frames"]), maximum, total)
    return _steps(total, max(1, math.floor(count / together) * together))


def _fixed_number(video: Video, settings: Settings) -> list[int]:
    """Selects frames for Gemma 4: always `num_frames`, in equal steps from the first on; all frames of a shorter
    video."""
    return _steps(video.num_frames, min(settings["num_frames"], video.num_frames))


def _by_rate(video: Video, settings: Settings) -> list[int]:
    """Selects frames for Kimi K2.5: `fps` frames a second (`sample_fps` in published files), in equal steps from the
    first on."""
    count = int(video.num_frames / video.fps * settings.get("fps", settings["sample_fps"]))
    return _steps(video.num_frames, min(max(count, 1), video.num_frames, settings["max_frames"]))


def _by_rate_at_least(video: Video, settings: Settings) -> list[int]:
    """Selects frames for MiniMax-M3: `fps` frames a second, but at least `min_frames`, in equal steps from the first
    on."""
    count = max(int(video.num_frames / video.fps * settings["fps"]), settings["min_frames"])
    return _steps(video.num_frames, min(count, settings["max_frames"], video.num_frames))


def _pairs_by_rate(video: Video, settings: Settings) -> list[int]:
    """Selects frames for Muse-Glimmer: `fps` frames a second, at most `num_frames`, in whole pairs from the first to
    the last. The reference class rounds in float32, so one frame in a thousand is the preceding one there."""
    together, total = settings["temporal_patch_size"], video.num_frames
    count = min(int(total * settings["fps"] / video.fps), settings["num_frames"], total)
    count = min(max(together, count // together * together), total)
    return [number * (total - 1) // max(count - 1, 1) for number in range(count)]


def _steps(total: int, count: int) -> list[int]:
    return [int(index) for index in (np.arange(count) * (total / count)).astype(int)]


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
    return _whole_pairs([min(last, math.ceil(round(time * video.fps, 6))) for time in times])


_RATES = ((30, 3.0), (300, 1.0), (math.inf, 0.5))
"""GLM-4.6V: length in seconds of a video up to which the grid has this many frames a second."""
_MAX_SECONDS, _MAX_SAMPLED = 2400, 640


def _by_length(video: Video, settings: Settings) -> list[int]:
    """Selects frames for GLM-4.6V: the longer a video, the fewer frames a second."""
    counted = min(video.num_frames / video.fps, _MAX_SECONDS)
    rate = settings["temporal_patch_size"] * next(rate for seconds, rate in _RATES if counted <= seconds)
    return _by_interval(video, rate, min(int(counted * rate), _MAX_SAMPLED))


def _by_rate_and_time(video: Video, settings: Settings) -> list[int]:
    """Selects frames for GLM-5.3-Flash: `fps` frames a second; a video longer than `max_duration` seconds (if not 0)
    gets as many as one of that length."""
    rate, counted = settings["fps"], video.num_frames / video.fps
    if settings["max_duration"] > 0:
        counted = min(counted, settings["max_duration"])
    return _by_interval(video, rate, min(int(counted * rate), settings["max_frames"]))


def _by_interval(video: Video, rate: float, count: int) -> list[int]:
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
    return _whole_pairs(indices)


def _whole_pairs(indices: Sequence[int]) -> list[int]:
    """Returns each frame once, and the last one twice if their number is odd."""
    unique = list(dict.fromkeys(indices))
    return unique + unique[-1:] * (len(unique) % 2)


# --- patches ----------------------------------------------------------------------------------------------------------


def _merged_size(video: Video, count: int, settings: Settings) -> tuple[int, int]:
    """Returns width and height in whole squares of patches. `max_pixels` counts all frames, or, with
    `max_pixels_of_all` as the limit of the sum, each frame; one frame fits an encoder step."""
    factor, together = settings["patch_size"] * settings["merge_size"], settings["temporal_patch_size"]
    (width, height), count = video.size, max(count, together)
    if min(width, height) < factor:
        scale = max(factor / height, factor / width)
        width, height = int(width * scale), int(height * scale)
    if max(width, height) > MAX_SCALED_ASPECT * min(width, height):
        raise MediaError(
            f"a video is {width} x {height} pixels: a side is more than {MAX_SCALED_ASPECT} times the other"
        )
    columns, rows = round(width / factor) * factor, round(height / factor) * factor
    frames, minimum, maximum = round(count / together) * together, settings["min_pixels"], settings["max_pixels"]
    if "max_pixels_of_all" in settings:
        share = settings["max_pixels_of_all"] * together // count
        maximum, frames, count = max(min(maximum, share), int(minimum * 1.05)), 1, 1
    maximum = min(maximum, frames * PATCHES_A_STEP * settings["patch_size"] ** 2)
    if frames * rows * columns > maximum:
        shrink = math.sqrt(count * height * width / maximum)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif frames * rows * columns < minimum:
        grow = math.sqrt(minimum / (count * height * width))
        rows, columns = math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return columns, rows


def _size_of_each(video: Video, count: int, settings: Settings) -> tuple[int, int]:
    """Returns the size for MiniMax-M3: `max_pixels` is a limit of each frame; frames that attend to one another fit an
    encoder step."""
    patch = settings["patch_size"]
    maximum = min(settings["max_pixels"], PATCHES_A_STEP // _CLIP_FRAMES * patch**2)
    return within(video.size, patch * settings["merge_size"], settings["min_pixels"], maximum)


def _merged_patches(frames: np.ndarray, settings: Settings) -> Patches:
    """Converts frames [F, height, width, 3] uint8. The patches of a merged square are contiguous, each with the values
    of its temporal patch's frames."""
    merge, patch, together = (settings[key] for key in ("merge_size", "patch_size", "temporal_patch_size"))
    times, rows, columns = frames.shape[0] // together, frames.shape[1] // patch, frames.shape[2] // patch
    values = normalized(frames, settings)
    values = values.reshape(times, together, rows // merge, merge, patch, columns // merge, merge, patch, 3)
    pixels = values.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(times * rows * columns, -1)
    tokens = times * rows * columns // merge**2
    return Patches(np.ascontiguousarray(pixels), (times, rows, columns), tokens)


def _nearest_shape(video: Video, count: int, settings: Settings) -> tuple[int, int]:
    """Returns the size for Muse-Glimmer: `max_video_frame_tokens` is a limit of each frame."""
    merge = settings["merge_size"]
    maximum = min(settings["max_video_frame_tokens"], PATCHES_A_STEP // merge**2)
    return nearest_shape(video.size, settings["patch_size"] * merge, maximum)


def _pooled_size(video: Video, count: int, settings: Settings) -> tuple[int, int]:
    """Returns the size for Gemma 4: the largest of the same aspect ratio whose pooled patches are within
    `max_soft_tokens`."""
    (width, height), maximum = video.size, settings["max_soft_tokens"]
    side = settings["patch_size"] * settings["pooling_kernel_size"]
    scale = math.sqrt(maximum * side**2 / (width * height))
    columns, rows = math.floor(scale * width / side), math.floor(scale * height / side)
    if not columns and not rows:
        raise MediaError(f"a video is {width} x {height} pixels, of which nothing would be left")
    if not columns or not rows:  # one row, or one column
        long = min(max(width, height) // min(width, height), maximum)
        columns, rows = (1, long) if not columns else (long, 1)
    return columns * side, rows * side


def _size_without_padding(video: Video, count: int, settings: Settings) -> tuple[int, int]:
    """Returns the size for Kimi K2.5: as for images, with fewer patches; whole squares of patches are filled up with
    black."""
    maximum = settings.get("in_patch_limit_each_frame") or settings.get("max_patches", PATCHES_A_STEP)
    return never_enlarged(video.size, settings, min(maximum, PATCHES_A_STEP // _CLIP_FRAMES))


def _padded_patches(frames: np.ndarray, settings: Settings) -> Patches:
    """Converts frames [F, height, width, 3] uint8."""
    parts = [padded_patches(frame, settings) for frame in frames]
    _, rows, columns = parts[0].grid
    pixels = np.concatenate([part.pixels for part in parts])
    return Patches(pixels, (len(parts), rows, columns), sum(part.num_tokens for part in parts[::_CLIP_FRAMES]))


def _row_by_row(frames: np.ndarray, settings: Settings) -> Patches:
    """Converts frames [F, height, width, 3] uint8. The values of a patch are those of its pixels, one after the
    other."""
    patch, pool = settings["patch_size"], settings["pooling_kernel_size"]
    count, rows, columns = frames.shape[0], frames.shape[1] // patch, frames.shape[2] // patch
    values = normalized(frames, settings).reshape(count, rows, patch, columns, patch, 3)
    pixels = values.transpose(0, 1, 3, 2, 4, 5).reshape(count * rows * columns, -1)
    return Patches(np.ascontiguousarray(pixels), (count, rows, columns), count * rows * columns // pool**2)


def _frame_by_frame(frames: np.ndarray, settings: Settings) -> Patches:
    """Converts frames [F, height, width, 3] uint8 to patches row by row, each with the values of its temporal patch,
    one frame after the other."""
    merge, patch, together = (settings[key] for key in ("merge_size", "patch_size", "temporal_patch_size"))
    times, rows, columns = frames.shape[0] // together, frames.shape[1] // patch, frames.shape[2] // patch
    values = normalized(frames, settings).reshape(times, together, rows, patch, columns, patch, 3)
    pixels = values.transpose(0, 2, 4, 1, 6, 3, 5).reshape(times * rows * columns, -1)
    return Patches(np.ascontiguousarray(pixels), (times, rows, columns), times * rows * columns // merge**2)


# --- families ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Form:
    """How a family reads videos. `defaults`: settings that a model's files may leave out. `middle`: a temporal patch
    gets the mean time of its frames, otherwise the time of the first. `pooled`: grid frames that share the placeholders
    of one; if the last pool has fewer, no frame is repeated. `on_a_canvas`: frames keep their aspect ratio and are
    padded with black; `size` is not called then."""

    frames: Callable[[Video, Settings], list[int]]
    written: Written
    defaults: Mapping[str, object]
    middle: bool = False
    pooled: int = 1
    size: Callable[[Video, int, Settings], tuple[int, int]] = _merged_size
    patches: Callable[[np.ndarray, Settings], Patches] = _merged_patches
    on_a_canvas: bool = False
    resample: Image.Resampling = Image.Resampling.BICUBIC


_PAIRS = {"temporal_patch_size": 2, "merge_size": 2, "fps": 2.0, "max_frames": 768}
_OF_GLM = {**_PAIRS, **OF_CLIP, "min_pixels": 112**2, "max_pixels": 28 * 28 * 2 * 30000, "max_duration": 300}
_OF_GLM5 = {
    **_PAIRS,
    **OF_CLIP,
    "max_frames": 2048,
    "max_duration": 0,
    "patch_expand_factor": 1,
    "min_image_tokens": 16,
    "max_image_tokens": 240000,
}
_OF_QWEN3 = {
    "image_mean": (0.5,) * 3,
    "image_std": (0.5,) * 3,
    "patch_size": 16,
    "min_frames": 4,
    "min_pixels": 128 * 32 * 32,
    "max_pixels": 32 * 32 * 768,
}
_OF_QWEN2_5 = {
    "min_frames": 4,
    "min_pixels": 128 * 28 * 28,
    "max_pixels": 28 * 28 * 768,
    "max_pixels_of_all": int(0.9 * 128000 * 28 * 28),
}
_OF_GEMMA = {
    "image_mean": (0.0,) * 3,
    "image_std": (1.0,) * 3,
    "patch_size": 16,
    "max_soft_tokens": 70,
    "pooling_kernel_size": 3,
    "num_frames": 32,
    "temporal_patch_size": 1,
    "max_frames": 768,
}
_OF_KIMI = {
    "image_mean": (0.5,) * 3,
    "image_std": (0.5,) * 3,
    "patch_size": 14,
    "merge_size": 2,
    "sample_fps": 2.0,
    "max_frames": 2048,
}
_OF_M3 = {
    **OF_M3,
    "fps": 1.0,
    "min_frames": 4,
    "max_frames": 768,
    "min_pixels": 4 * 28**2,
    "max_pixels": 768 * 28**2,
}
_OF_MUSE = {**OF_MUSE, "fps": 2.0, "num_frames": 96, "max_frames": 768, "max_video_frame_tokens": 144}
_GLM_MARKS = ("<|begin_of_image|>", "<|end_of_image|>{}")
_FORMS: Mapping[str, _Form] = {
    "qwen3_vl": _Form(
        _spread_by_rate,
        _each_frame("<{} seconds><|vision_start|>", "<|vision_end|>", "{:.1f}".format),
        {**_PAIRS, **_OF_QWEN3},
        middle=True,
    ),
    "qwen2_5_vl": _Form(_steps_by_rate, _all_frames, {**_PAIRS, **OF_CLIP, **_OF_QWEN2_5}),
    "glm4v": _Form(_rounded_up, _each_frame(*_GLM_MARKS, lambda time: str(int(time))), _OF_GLM),
    "glm46v": _Form(_by_length, _each_frame(*_GLM_MARKS, "{:.1f} seconds".format), _OF_GLM),
    "glm5_next": _Form(
        _by_rate_and_time, _each_frame(*_GLM_MARKS, "{:.1f} seconds".format), _OF_GLM5, on_a_canvas=True
    ),
    "kimi_k25": _Form(
        _by_rate, _clips_of_four, _OF_KIMI, pooled=_CLIP_FRAMES, size=_size_without_padding, patches=_padded_patches
    ),
    "minimax_m3": _Form(
        _by_rate_at_least,
        _each_frame("]<]{} seconds[>[]<]start of image[>[", "]<]end of image[>[", "{:.1f}".format),
        _OF_M3,
        size=_size_of_each,
    ),
    "muse_glimmer": _Form(
        _pairs_by_rate,
        _closed_by("<|vid_start|>", "Time: {:.1f}s".format, "<|vid_frame_separator|>", "<|vid_end|>"),
        _OF_MUSE,
        size=_nearest_shape,
        patches=_frame_by_frame,
        resample=Image.Resampling.LANCZOS,
    ),
    "gemma4": _Form(_fixed_number, _clocks, _OF_GEMMA, size=_pooled_size, patches=_row_by_row),
}

FAMILIES = tuple(_FORMS)
"""Families of processors that prepare videos."""


def video_processor(files: ProcessorFiles) -> VideoProcessor:
    """Returns the processor of the model's videos."""
    return VideoProcessor(_FORMS[files.family], files.video)


def reads_videos(files: ProcessorFiles) -> bool:
    """Returns whether the family reads videos."""
    return files.family in FAMILIES


class VideoProcessor:
    """Converts a model's videos to patches and prompt parts."""

    def __init__(self, form: _Form, settings: Settings) -> None:
        given = {**settings, **edges(settings)}
        self._form = form
        self._settings = {**form.defaults, **{key: value for key, value in given.items() if value is not None}}

    def __call__(self, video: Video) -> VideoPatches:
        form, settings = self._form, self._settings
        indices = self._indices(video)
        canvas = fitted(video.size, len(indices), settings) if form.on_a_canvas else None
        size = form.size(video, len(indices), settings) if canvas is None else canvas.content
        frames = [resized(frame, size, form.resample) for frame in _repeated(video, indices)]
        together = settings["temporal_patch_size"] if form.pooled == 1 else 1
        missing = -len(frames) % together
        frames += frames[-1:] * missing
        indices += indices[-1:] * missing
        firsts, lasts = indices[::together], indices[together - 1 :: together]
        lasts = lasts if form.middle else firsts
        times = [(first + last) / 2 / video.fps for first, last in zip(firsts, lasts, strict=True)]
        pictures = np.stack(frames)
        patches = form.patches(pictures if canvas is None else canvas.around(pictures), settings)
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
