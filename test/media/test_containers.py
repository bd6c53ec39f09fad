"""Videos in containers: every kind, frames by number, and damaged files."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from media.moving_pictures import grey, sound_file, turned, video_file
from media.pictures import animation
from sglang.srt.managers.front.media import containers
from sglang.srt.managers.front.media.containers import Container, open_video
from sglang.srt.managers.front.media.decoding import Animation
from sglang.srt.towers.pictures.video import MediaError

KINDS = [
    ("mp4", "libx264"),
    ("mov", "libx264"),
    ("matroska", "libx264"),
    ("webm", "libvpx-vp9"),
    ("webm", "libvpx"),
    ("webm", "libsvtav1"),
    ("mp4", "libx265"),
    ("mp4", "mpeg4"),
]
ASKED = [0, 3, 9, 10, 19]


@pytest.mark.parametrize(("form", "codec"), KINDS)
def test_frames_by_number(form: str, codec: str) -> None:
    """Also those between two that depend on no other, and those after which decoding goes on elsewhere."""
    video = open_video(video_file(form, codec))
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    assert (video.num_frames, video.fps, video.size, video.is_sampled) == (20, 10, (64, 48), False)
    for asked in (ASKED, range(20), [17]):
        shown = [np.asarray(frame)[24:].mean() for frame in video.frames(list(asked))]
        assert shown == pytest.approx([grey(number, 20) for number in asked], abs=5)


def test_a_frame_asked_for_twice_or_again_later() -> None:
    video = open_video(video_file())
    shown = [np.asarray(frame)[24:].mean() for frame in video.frames([4, 4, 12, 12])]
    assert shown == pytest.approx([grey(number, 20) for number in (4, 4, 12, 12)], abs=5)


def test_pictures_stand_upright() -> None:
    video = open_video(turned(video_file()))
    assert video.size == (48, 64)
    frame = np.asarray(next(video.frames([0])))
    assert frame[:, -8:].mean() > 240 and frame[:, :32].mean() < 15, "the upper edge is at the right"


def test_other_files_are_animations() -> None:
    assert isinstance(open_video(animation()), Animation)


MP4, WEBM = video_file(), video_file("webm", "libvpx")


def without_index(mp4: bytes) -> bytes:
    return mp4[: mp4.index(b"moov") - 4]


def changed(data: bytes, old: bytes, new: bytes) -> bytes:
    assert old in data
    return data.replace(old, new)


BAD: dict[str, tuple[bytes, str]] = {
    "only the first box": (b"\x00\x00\x00\x18ftypmp42" + bytes(200), "damaged"),
    "without its index": (without_index(MP4), "damaged"),
    "pictures that are cut off": (without_index(MP4)[:-900] + MP4[len(without_index(MP4)) :], "damaged"),
    "half a WebM": (WEBM[:200], "damaged"),
    "a WebM of zeros": (WEBM[:4] + bytes(3000), "damaged"),
    "only sound": (sound_file(), "no pictures"),
    "a codec that is not read": (video_file("matroska", "ffv1"), "ffv1"),
    "a codec that nobody knows": (changed(MP4, b"avc1", b"zzz9"), "the pictures of a video are in"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_with_the_reason(name: str) -> None:
    data, reason = BAD[name]
    with pytest.raises(MediaError, match=reason):
        list(open_video(data).frames([0]))


def test_too_many_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "MAX_FRAMES", 19)
    with pytest.raises(MediaError, match="more than 19 frames"):
        open_video(MP4)


def test_playlists_are_no_containers() -> None:
    for text in (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", b"ffconcat version 1.0\nfile /etc/passwd\n"):
        with pytest.raises(MediaError, match="no format"):
            open_video(text)


def test_without_pyav_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "av", None)
    with pytest.raises(MediaError, match="pip install"):
        open_video(MP4)


def test_bytes_that_change_anywhere_are_refused_or_read() -> None:
    """Never another error, and no frame of another number than asked for."""
    rng = np.random.default_rng(0)
    outcomes: dict[Any, int] = {}
    for data in (MP4, WEBM):
        for _ in range(60):
            bad = bytearray(data)
            for at in rng.integers(0, len(bad), 4):
                bad[at] = rng.integers(0, 256)
            try:
                video = open_video(bytes(bad))
                outcome = len(list(video.frames([0, video.num_frames - 1])))
            except MediaError:
                outcome = 0
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
    assert outcomes.keys() <= {0, 2}
    assert isinstance(open_video(MP4), Container)
