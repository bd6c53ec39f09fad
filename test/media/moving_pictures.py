"""Files of videos in containers, good and bad."""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import av
import numpy as np

Size = tuple[int, int]


def grey(number: int, count: int) -> int:
    """Brightness of a frame: they go from black to white."""
    return number * 255 // count


@contextmanager
def same_scheduling() -> Iterator[None]:
    """Takes back the real-time priority that SVT-AV1's encoder gives the thread that calls it where that is root's:
    all processes that later tests start would inherit it, and leave nothing to others."""
    policy, priority = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, priority)


@same_scheduling()
def video_file(
    form: str = "mp4", codec: str = "libx264", count: int = 20, fps: int = 10, size: Size = (64, 48), keys: int = 8
) -> bytes:
    """Frames of one brightness each. keys: of so many frames one depends on no other."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=form) as file:
        stream = file.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = *size, "yuv420p", keys
        for number in range(count):
            pixels = np.full((size[1], size[0], 3), grey(number, count), np.uint8)
            pixels[: size[1] // 4] = 255 - pixels[: size[1] // 4]  # the upper edge is told from the others
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                file.mux(packet)
        for packet in stream.encode():
            file.mux(packet)
    return buffer.getvalue()


def sound_file() -> bytes:
    """An MP4 without pictures."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as file:
        stream = file.add_stream("aac", rate=16000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        for packet in [*stream.encode(frame), *stream.encode()]:
            file.mux(packet)
    return buffer.getvalue()


def turned(mp4: bytes) -> bytes:
    """The same file as a telephone that is held upright writes it: to be shown turned to the right by a quarter."""
    upright = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    right = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30)
    at = mp4.index(upright, mp4.index(b"tkhd"))
    return mp4[:at] + right + mp4[at + len(upright) :]
