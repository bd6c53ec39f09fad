"""Frames, sizes, patches and texts of videos against what the classes of transformers 5.17 give (with torchvision)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from media.pictures import animation, encoded, picture
from media.processing import image_processor, video_processor
from sglang.srt.managers.front.media import decoding
from sglang.srt.managers.front.media.containers import open_video
from sglang.srt.towers.pictures.processor_files import ProcessorFiles
from sglang.srt.towers.pictures.video import MediaError, Video
from sglang.srt.towers.pictures.video_processor import VideoProcessor

HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def make(family: str, **settings: Any) -> VideoProcessor:
    return video_processor(ProcessorFiles(family, {}, settings))


class Numbered(Video):
    """Frames that have their number as colours."""

    is_sampled = False

    def __init__(self, num_frames: int, fps: float, size: tuple[int, int]) -> None:
        super().__init__(num_frames, fps, size)

    def frames(self, indices: list[int]) -> Iterator[Image.Image]:
        for index in indices:
            yield Image.new("RGB", self.size, (index % 256, index // 256, 0))


# (frames, frames a second, size) -> by family: the grid and the first times of its frames
EXPECTED: dict[tuple[int, float, tuple[int, int]], dict[str, tuple[tuple[int, int, int], list[float]]]] = {
    (40, 10.0, (200, 120)): {
        "muse_glimmer": ((4, 10, 16), [0.0, 1.1, 2.2]),
        "qwen3_vl": ((4, 8, 12), [0.3, 1.4, 2.5]),
        "qwen2_5_vl": ((4, 18, 30), [0.0, 1.0, 2.0]),
        "glm4v": ((4, 8, 14), [0.0, 1.0, 2.0]),
        "glm46v": ((12, 8, 14), [0.0, 0.4, 0.7]),
        "glm5_next": ((4, 10, 16), [0.0, 1.0, 2.0]),
        "gemma4": ((32, 18, 30), [0.0, 0.1, 0.2]),
        "kimi_k25": ((8, 10, 16), [0.0, 0.5, 1.0]),
        "minimax_m3": ((2, 8, 14), [0.0, 2.0]),
    },
    (33, 24.0, (1280, 720)): {
        "muse_glimmer": ((1, 18, 32), [0.0]),
        "qwen3_vl": ((2, 20, 36), [0.23, 1.1]),
        "qwen2_5_vl": ((2, 40, 72), [0.0, 0.67]),
        "glm4v": ((1, 52, 92), [0.0]),
        "glm46v": ((4, 52, 92), [0.0, 0.25, 0.54]),
        "glm5_next": ((1, 52, 92), [0.0]),
        "gemma4": ((32, 18, 33), [0.0, 0.04, 0.08]),
        "kimi_k25": ((2, 50, 86), [0.0, 0.67]),
        "minimax_m3": ((2, 40, 72), [0.0, 0.67]),
    },
    (100, 29.97, (640, 480)): {
        "muse_glimmer": ((3, 20, 26), [0.0, 1.3, 2.64]),
        "qwen3_vl": ((3, 18, 26), [0.33, 1.65, 2.97]),
        "qwen2_5_vl": ((3, 34, 46), [0.0, 1.1, 2.2]),
        "glm4v": ((3, 34, 46), [0.0, 1.0, 2.0]),
        "glm46v": ((10, 34, 46), [0.0, 0.3, 0.6]),
        "glm5_next": ((3, 36, 46), [0.0, 1.0, 2.0]),
        "gemma4": ((32, 21, 27), [0.0, 0.1, 0.2]),
        "kimi_k25": ((6, 36, 46), [0.0, 0.53, 1.1]),
        "minimax_m3": ((2, 34, 46), [0.0, 1.67]),
    },
    (9000, 25.0, (40, 40)): {
        "muse_glimmer": ((48, 2, 2), [0.0, 7.56, 15.12]),
        "qwen3_vl": ((360, 2, 2), [0.26, 1.26, 2.26]),
        "qwen2_5_vl": ((360, 24, 24), [0.0, 1.0, 2.0]),
        "glm4v": ((300, 2, 2), [0.0, 1.24, 2.44]),
        "glm46v": ((180, 2, 2), [0.0, 2.0, 4.0]),
        "glm5_next": ((360, 4, 4), [0.0, 1.0, 2.0]),
        "gemma4": ((32, 24, 24), [0.0, 11.24, 22.48]),
        "kimi_k25": ((720, 4, 4), [0.0, 0.48, 1.0]),
        "minimax_m3": ((180, 4, 4), [0.0, 2.0, 4.0]),
    },
}
KIMI_AT_2 = ["00:00:02.000<|media_begin|>video<|media_content|>", 40, "<|media_end|>"]
CASES = [(video, family) for video, families in EXPECTED.items() for family in families]


@pytest.mark.parametrize(("video", "family"), [case for case in CASES if case[0][0] != 9000 or case[1] != "qwen2_5_vl"])
def test_frames_and_sizes(video: tuple[int, float, tuple[int, int]], family: str) -> None:
    grid, times = EXPECTED[video][family]
    result = make(family)(Numbered(*video))
    assert result.patches.grid == grid and len(result.patches.pixels) == np.prod(grid)
    assert result.times[:3] == pytest.approx(times, abs=0.01) and len(result.times) == grid[0]
    assert sum(part for part in result.parts if isinstance(part, int)) == result.patches.num_tokens


@pytest.mark.parametrize(
    ("family", "parts"),
    [
        ("qwen3_vl", ["<0.3 seconds><|vision_start|>", 24, "<|vision_end|>", "<1.4 seconds><|vision_start|>"]),
        ("qwen2_5_vl", [540]),
        ("glm4v", ["<|begin_of_image|>", 28, "<|end_of_image|>0", "<|begin_of_image|>", 28, "<|end_of_image|>1"]),
        ("glm46v", ["<|begin_of_image|>", 28, "<|end_of_image|>0.0 seconds", "<|begin_of_image|>"]),
        ("glm5_next", ["<|begin_of_image|>", 40, "<|end_of_image|>0.0 seconds", "<|begin_of_image|>"]),
        ("gemma4", ["00:00 ", 60, " 00:00 ", 60]),
        ("minimax_m3", ["]<]0.0 seconds[>[]<]start of image[>[", 28, "]<]end of image[>["]),
        ("muse_glimmer", ["<|vid_start|>Time: 0.0s", 40, "<|vid_frame_separator|>Time: 1.1s", 40]),
        ("kimi_k25", ["00:00:00.000<|media_begin|>video<|media_content|>", 40, "<|media_end|>", *KIMI_AT_2]),
    ],
)
def test_texts_between_frames(family: str, parts: list[str | int]) -> None:
    assert make(family)(Numbered(40, 10.0, (200, 120))).parts[: len(parts)] == parts


def test_the_time_between_frames_is_that_of_the_sample() -> None:
    assert make("qwen2_5_vl")(Numbered(33, 24.0, (64, 64))).frame_seconds == pytest.approx(0.6875)


def test_a_short_video_of_gemma_has_the_frames_that_there_are() -> None:
    assert make("gemma4")(Numbered(7, 5.0, (64, 90))).patches.grid == (7, 27, 21)


def test_a_video_of_one_picture_has_the_patches_of_the_image() -> None:
    settings = {**HALF, "patch_size": 16, "size": {"shortest_edge": 1024, "longest_edge": 1 << 20}}
    still = picture(96, 64)
    video = decoding.Pictures([encoded(still), encoded(still)])
    result = make("qwen3_vl", **settings)(video)
    image = image_processor(ProcessorFiles("qwen3_vl", settings, {}))(still)
    np.testing.assert_allclose(result.patches.pixels, image.pixels, atol=1e-6)
    assert result.patches.grid == image.grid and result.times == [0.25]


def test_frames_of_gemma_have_the_patches_of_the_image() -> None:
    settings = {"image_mean": [0.0] * 3, "image_std": [1.0] * 3, "max_soft_tokens": 70, "patch_size": 16}
    still = picture(96, 64)
    result = make("gemma4", **settings)(decoding.Pictures([encoded(still)] * 2))
    image = image_processor(ProcessorFiles("gemma4", {**settings, "pooling_kernel_size": 3}, {}))(still)
    assert result.patches.grid == (2, *image.grid[1:])
    for frame in np.split(result.patches.pixels, 2):
        np.testing.assert_allclose(frame, image.pixels, atol=1e-6)


def test_frames_of_muse_glimmer_have_the_patches_of_the_image() -> None:
    still = picture(96, 64)
    result = make("muse_glimmer")(decoding.Pictures([encoded(still)] * 3))
    image = image_processor(ProcessorFiles("muse_glimmer", {}, {}))(still)
    assert result.patches.grid == (2, *image.grid[1:]) and result.parts[-1] == "<|vid_end|>"
    for frame in np.split(result.patches.pixels, 2):
        np.testing.assert_array_equal(frame, image.pixels)


def test_frames_of_kimi_have_the_patches_of_the_image() -> None:
    """The settings of published checkpoints, and the flag's."""
    settings = {**HALF, "patch_size": 14, "merge_size": 2, "max_patches": 16384, "sample_fps": 2.0, "max_frames": None}
    still = picture(96, 64)
    result = make("kimi_k25", **settings)(decoding.Pictures([encoded(still)] * 5))
    image = image_processor(ProcessorFiles("kimi_k25", settings, {}))(still)
    assert result.patches.grid == (5, *image.grid[1:]) and result.patches.num_tokens == 2 * image.num_tokens
    for frame in np.split(result.patches.pixels, 5):
        np.testing.assert_array_equal(frame, image.pixels)
    assert make("kimi_k25", **settings, fps=1.0)(Numbered(40, 10.0, (200, 120))).patches.grid == (4, 10, 16)


def test_frames_of_glm_5_have_the_patches_of_the_image() -> None:
    """Both frames of a pair are the picture: black is added to it, and small ones are enlarged."""
    for still in (picture(96, 64), picture(40, 30)):
        result = make("glm5_next", **HALF)(decoding.Pictures([encoded(still)] * 2))
        image = image_processor(ProcessorFiles("glm5_next", HALF, {}))(still)
        assert result.patches.grid == image.grid and image.num_tokens >= 12
        np.testing.assert_allclose(result.patches.pixels, image.pixels, atol=1e-6)


def test_frames_of_an_animation_are_sampled_by_time() -> None:
    settings = {**HALF, "patch_size": 16, "fps": 2, "min_frames": 4, "max_frames": 6}
    result = make("qwen3_vl", **settings)(open_video(animation(40, milliseconds=100)))
    assert result.times == pytest.approx([0.4, 1.95, 3.5], abs=0.06)
    brightness = result.patches.pixels.reshape(3, -1).mean(1)
    assert list(brightness) == sorted(brightness)


def test_limits() -> None:
    with pytest.raises(MediaError, match="17 frames; the model takes 16"):
        make("qwen3_vl", max_frames=16)(decoding.Pictures([encoded(picture())] * 17))
    with pytest.raises(MediaError, match="times the other"):
        make("glm46v")(Numbered(4, 2.0, (9000, 40)))
    large = make("qwen3_vl", size={"shortest_edge": 1024, "longest_edge": 1 << 30})(Numbered(4, 1.0, (4000, 3000)))
    assert large.patches.grid[1] * large.patches.grid[2] <= 1 << 14, "one frame fits an encoder step"
    large = make("glm5_next")(Numbered(4, 1.0, (4000, 3000)))
    assert 15000 <= large.patches.grid[1] * large.patches.grid[2] <= 1 << 14
    with pytest.raises(MediaError, match="32 frames, more than there may be tokens"):
        make("glm5_next", max_image_tokens=15)(Numbered(32, 2.0, (64, 64)))
    tall = make("kimi_k25")(Numbered(9, 2.0, (400, 4000)))
    assert tall.patches.grid[1] * tall.patches.grid[2] <= 4600, "a clip of four fits an encoder step, but for black"
    large = make("minimax_m3", max_pixels=1 << 30)(Numbered(4, 1.0, (4000, 3000)))
    assert 3000 <= large.patches.grid[1] * large.patches.grid[2] <= 4096, "so does one here"
