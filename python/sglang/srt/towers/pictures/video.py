"""Videos as processors read them, and limits of pictures and videos."""

from __future__ import annotations

from collections.abc import Iterator

from PIL import Image

MAX_PIXELS = 1 << 26
"""Pixels of an image, or of a frame of a video."""
MAX_SIDE = 1 << 16
MAX_FRAMES = 1 << 14
"""Frames of a file, most of which are skipped."""


class MediaError(ValueError):
    """Raised when a file is refused; the message says why."""


def check_size(size: tuple[int, int]) -> None:
    """Raises MediaError for pictures that are too large."""
    width, height = size
    if not (0 < width <= MAX_SIDE and 0 < height <= MAX_SIDE):
        raise MediaError(f"an image is {width} x {height} pixels; a side may have 1 to {MAX_SIDE}")
    if width * height > MAX_PIXELS:
        raise MediaError(f"an image has {width * height} pixels, more than {MAX_PIXELS}; send a smaller one")


class Video:
    """A video whose frames all have one size. `fps` is the file's. `frames(indices)` yields frames at ascending
    indices, in RGB."""

    is_sampled: bool

    def __init__(self, num_frames: int, fps: float, size: tuple[int, int], maximum: int = MAX_FRAMES) -> None:
        """maximum: limit of the frames. Raises MediaError."""
        if not 1 <= num_frames <= maximum:
            raise MediaError(f"a video has {num_frames} frames; 1 to {maximum} are read")
        check_size(size)
        self.num_frames, self.fps, self.size = num_frames, fps, size

    def frames(self, indices: list[int]) -> Iterator[Image.Image]:
        """Yields the frames with these numbers, which must ascend, as RGB pictures. Raises MediaError."""
        raise NotImplementedError
