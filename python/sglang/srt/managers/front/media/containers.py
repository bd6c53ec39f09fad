"""Decodes videos in containers (MP4, MOV, WebM, MKV) with PyAV, in a worker process like all files.

The container's kind is read from the file's first bytes instead of guessed by FFmpeg, whose formats include playlists,
which name other files. References of a file to others are not followed either.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from PIL import Image

from sglang.srt.managers.front.media import decoding
from sglang.srt.towers.pictures.video import MediaError, Video, check_size

try:
    import av
except ImportError:
    av = None  # type: ignore[assignment]

MAX_FRAMES = 1 << 16
"""Frames of a file, most of which are not decoded: half an hour at 30 a second."""
CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mjpeg")
_MAX_FPS = 1000.0
_DEFAULT_FPS = 24.0
_THREADS = 2
_CUT_OFF = "a video is damaged or cut off"
_OPTIONS = {"protocol_whitelist": "none", "enable_drefs": "0"}
"""Options that keep FFmpeg from opening anything but the data."""


def container_format(data: bytes) -> str | None:
    """Returns FFmpeg's name of the container that the file's first bytes show; None if it is not supported."""
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "mov"
    return "matroska" if data[:4] == b"\x1a\x45\xdf\xa3" else None


class Container(Video):
    """The first video stream of a file. Between requested frames, only the frames that they depend on are decoded."""

    is_sampled = False

    def __init__(self, data: bytes, form: str) -> None:
        if av is None:
            raise MediaError(
                "a video is in a container (MP4, WebM, MKV or MOV), which this server does not read: it needs PyAV (pip"
                " install 'sm120-sglang[video]'); or send its frames as data:video/jpeg;base64,FRAME,FRAME,..."
            )
        with _media_errors():
            self._file: Any = av.open(io.BytesIO(data), format=form, options=_OPTIONS)
            self._stream = _moving_picture(self._file)
            self._times, self._keys = _times(self._file, self._stream)
        check_size((self._stream.width, self._stream.height))
        frame = next(self._decoded(self._times[0]), None)
        if frame is None:
            raise MediaError(_CUT_OFF)
        super().__init__(len(self._times), self._rate(), _upright(frame).size, MAX_FRAMES)

    def frames(self, indices: list[int]) -> Iterator[Image.Image]:
        """Yields the frames with these numbers, which must ascend, as RGB pictures. Raises MediaError."""
        decoded: Iterator[Any] = iter(())
        here, shown = -1, None
        for index in indices:
            wanted = self._times[index]
            if bisect_right(self._keys, wanted) != here:
                decoded, here = self._decoded(wanted), bisect_right(self._keys, wanted)
            while shown is None or _time(shown) < wanted:
                frame = next(decoded, None)
                if frame is None:
                    break
                shown = frame
            if shown is None:
                raise MediaError(f"{_CUT_OFF} at frame {index}")
            yield _upright(shown)

    def _decoded(self, time: int) -> Iterator[Any]:
        """Yields the frames from the last key frame at or before `time` on."""
        with _media_errors():
            self._file.seek(time, stream=self._stream, backward=True)
            for frame in self._file.decode(self._stream):
                check_size((frame.width, frame.height))
                yield frame

    def _rate(self) -> float:
        """Returns the frames per second."""
        rate = float(self._stream.average_rate or self._stream.guessed_rate or _DEFAULT_FPS)
        if not 1 / _MAX_FPS <= rate <= _MAX_FPS:
            raise MediaError(f"a video has {rate:g} frames a second; 0.001 to {_MAX_FPS:g} are read")
        return rate


def _moving_picture(file: Any) -> Any:
    """Returns the first video stream that is not a cover picture. Raises MediaError."""
    streams = [stream for stream in file.streams.video if not stream.disposition & av.stream.Disposition.attached_pic]
    if not streams:
        raise MediaError("a video has sound alone, or nothing at all: there are no pictures in it")
    stream = streams[0]
    codec = stream.codec_context
    name = codec.codec.canonical_name if codec is not None else "unknown"
    if name not in CODECS:
        raise MediaError(f"the pictures of a video are in {name}; read are {', '.join(CODECS)}")
    codec.thread_type, codec.thread_count = "AUTO", _THREADS
    return stream


def _times(file: Any, stream: Any) -> tuple[list[int], list[int]]:
    """Returns the time of each frame in units of the stream, and those of key frames, without decoding. Raises
    MediaError."""
    times: list[int] = []
    keys: list[int] = []
    for packet in file.demux(stream):
        time = packet.dts if packet.pts is None else packet.pts
        if not packet.size or time is None:
            continue
        times.append(time)
        if packet.is_keyframe:
            keys.append(time)
        if len(times) > MAX_FRAMES:
            raise MediaError(f"a video has more than {MAX_FRAMES} frames; send a part of it")
    if not times or stream.frames > len(times):
        raise MediaError(f"{_CUT_OFF}: {len(times)} of {stream.frames or 'its'} frames are there")
    return sorted(times), sorted(keys)


def _time(frame: Any) -> int:
    time = frame.dts if frame.pts is None else frame.pts
    return -1 if time is None else int(time)


def _upright(frame: Any) -> Image.Image:
    image: Image.Image = frame.to_image()
    return image.rotate(frame.rotation, expand=True) if frame.rotation else image


@contextmanager
def _media_errors() -> Iterator[None]:
    """Converts FFmpeg's errors about a file to MediaError."""
    try:
        yield
    except (MemoryError, MediaError):
        raise
    except (av.error.FFmpegError, ValueError, OverflowError) as error:
        raise MediaError(f"{_CUT_OFF}: {getattr(error, 'strerror', None) or error}") from None


def open_video(data: bytes) -> Video:
    """Opens a file. Raises MediaError."""
    form = container_format(data)
    return decoding.open_animation(data) if form is None else Container(data, form)
