"""Whatever a client sends as an image: a clear 4xx over a real socket, while another client is answered."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import LiveServer

from media.moving_pictures import sound_file, video_file
from media.pictures import animation, data_url, encoded, picture, png_of_size

GOOD = encoded(picture())
JPEG = encoded(picture(), "JPEG")
TRUNCATED_JPEG = JPEG[: len(JPEG) // 2]
SLOWEST_S = 3.0


class Neighbour:
    """A client that asks for text again and again."""

    def __init__(self, url: str) -> None:
        self.slowest, self.count = 0.0, 0
        self._url, self._stop = url, threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self._stop.is_set():
                started = time.monotonic()
                body = {"text": "Hello", "sampling_params": {"max_new_tokens": 2}}
                assert client.post("/generate", json=body).status_code == 200
                self.slowest = max(self.slowest, time.monotonic() - started)
                self.count += 1
                time.sleep(0.02)

    def end(self) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture(scope="module")
def neighbour(server: LiveServer, http: httpx.Client) -> Iterator[Neighbour]:
    assert ask(http, data_url(GOOD)).status_code == 200  # the processes have started
    neighbour = Neighbour(server.url)
    yield neighbour
    neighbour.end()
    assert neighbour.count > 10
    assert neighbour.slowest < SLOWEST_S, neighbour.slowest


def ask(http: httpx.Client, url: Any, kind: str = "image_url") -> httpx.Response:
    content = [{"type": "text", "text": "Look"}, {"type": kind, kind: {"url": url}}]
    return http.post("/v1/chat/completions", json={"max_tokens": 2, "messages": [{"role": "user", "content": content}]})


PRIVATE = "not public"
IMAGES: dict[str, tuple[str, str]] = {
    "no data": ("data:image/png;base64,", "no data"),
    "no comma": ("data:image/png;base64", "no comma"),
    "not base64": ("data:image/png;base64,@@@@", "not base64"),
    "half of a base64 group": ("data:image/png;base64,AAAAA", "not base64"),
    "text in a data URL": ("data:text/plain,hello", "must be in base64"),
    "characters beyond ASCII": ("data:image/png;base64,Ä", "beyond ASCII"),
    "only blanks": ("data:image/png;base64,    ", "no data"),
    "a word": ("cat.png", "not base64"),
    "text as an image": (data_url(b"hello, this is a text and no image"), "in no format"),
    "zeros": (data_url(bytes(5000)), "in no format"),
    "an SVG": (data_url(b"<?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg'/>"), "SVG"),
    "a web page": (data_url(b"<!DOCTYPE html><html></html>"), "web page"),
    "a PDF": (data_url(b"%PDF-1.7\n1 0 obj\n"), "in no format"),
    "an archive": (data_url(b"PK\x03\x04" + bytes(100)), "in no format"),
    "an EPS program": (data_url(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), "in no format"),
    "a TIFF": (data_url(encoded(picture(), "TIFF")), "in no format"),
    "half a JPEG": (data_url(TRUNCATED_JPEG, "image/jpeg"), "damaged"),
    "half a PNG": (data_url(GOOD[: len(GOOD) // 2]), "damaged"),
    "half a GIF": (data_url(animation()[:60]), "damaged"),
    "half a WebP": (data_url(encoded(picture(), "WEBP")[:90]), "image"),
    "only the head of a PNG": (data_url(GOOD[:20]), "image"),
    "a PNG with changed bytes": (data_url(GOOD[:60] + bytes(50) + GOOD[110:]), "damaged"),
    "a bomb of 100,000 x 100,000": (data_url(png_of_size(100_000, 100_000)), "pixels"),
    "a bomb of 2^31 x 2^31": (data_url(png_of_size(2**31 - 1, 2**31 - 1)), "image"),
    "a bomb within the sides": (data_url(png_of_size(60_000, 60_000)), "pixels"),
    "a PNG of no width": (data_url(png_of_size(0, 10)), "image"),
    "100,000 x 1": (data_url(encoded(picture(1000, 1).resize((100_000, 1)))), "65536"),
    "60,000 x 1": (data_url(encoded(picture(1000, 1).resize((60_000, 1)))), "aspect ratio"),
    "too many bytes": ("data:image/png;base64," + "A" * (6 << 20), "MiB"),
    "loopback": ("http://127.0.0.1/x.png", PRIVATE),
    "loopback by name": ("http://localhost:80/x.png", PRIVATE),
    "loopback as a number": ("http://2130706433/x.png", PRIVATE),
    "loopback in hex": ("http://0x7f000001/x.png", PRIVATE),
    "loopback, shortened": ("http://127.1/x.png", PRIVATE),
    "loopback in IPv6": ("http://[::1]/x.png", PRIVATE),
    "loopback mapped": ("http://[::ffff:127.0.0.1]/x.png", PRIVATE),
    "any address": ("http://0.0.0.0/x.png", PRIVATE),
    "the address of cloud data": ("http://169.254.169.254/latest/meta-data", PRIVATE),
    "a private address": ("https://10.0.0.1/x.png", PRIVATE),
    "another private address": ("http://192.168.1.1/x.png", PRIVATE),
    "multicast": ("http://224.0.0.1/x.png", PRIVATE),
    "a name without an address": ("https://no-such-host.invalid/x.png", "no address"),
    "a name with a password": ("http://user:pass@8.8.8.8/x.png", "password"),
    "an FTP address": ("ftp://8.8.8.8/x.png", "no http"),
    "a gopher address": ("gopher://8.8.8.8/x", "no http"),
    "a javascript address": ("javascript:alert(1)", "no http"),
    "no host": ("http:///x.png", "no URL"),
    "a wrong port": ("http://8.8.8.8:99999/x.png", "no URL"),
    "a line break": ("http://8.8.8.8/x\r\nHost: y", "no URL"),
    "a long URL": ("http://8.8.8.8/" + "x" * 10_000, "characters"),
    "a file outside": ("file:///etc/passwd", "no file under"),
    "a file above": ("file:///tmp/../etc/passwd", "no file under"),
    "a file of another machine": ("file://server/share/x.png", "another machine"),
    "a file of no bytes and no end": ("file:///dev/zero", "no file under"),
    "a file with a zero in its name": ("file:///a%00b", "no file under"),
}


@pytest.mark.parametrize("name", IMAGES)
def test_a_bad_image_is_refused_with_the_reason(http: httpx.Client, neighbour: Neighbour, name: str) -> None:
    url, reason = IMAGES[name]
    answer = ask(http, url)
    assert 400 <= answer.status_code < 500, answer.text
    assert reason in answer.json()["message"], answer.text


VIDEOS: dict[str, tuple[str, str]] = {
    "an MP4 of nothing": (data_url(b"\x00\x00\x00\x18ftypmp42" + bytes(200), "video/mp4"), "damaged"),
    "half an MP4": (data_url(video_file()[:900], "video/mp4"), "damaged"),
    "a WebM of zeros": (data_url(b"\x1a\x45\xdf\xa3" + bytes(5000), "video/webm"), "damaged"),
    "an MP4 of sound": (data_url(sound_file(), "video/mp4"), "no pictures"),
    "a playlist": (data_url(b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n"), "no format"),
    "text": (data_url(b"hello, this is no video"), "no format"),
    "half a GIF": (data_url(animation(40)[:400]), "damaged"),
    "a bad frame": ("data:video/jpeg;base64,AAAA,BBBB", "no format"),
    "an empty frame": ("data:video/jpeg;base64," + base64.b64encode(JPEG).decode() + ",", "no data"),
    "too many frames": ("data:video/jpeg;base64," + ",".join([base64.b64encode(JPEG).decode()] * 17), "16"),
    "a long and narrow one": (data_url(animation(4, 9000, 40)), "times the other"),
}


@pytest.mark.parametrize("name", VIDEOS)
def test_a_bad_video_is_refused_with_the_reason(http: httpx.Client, neighbour: Neighbour, name: str) -> None:
    url, reason = VIDEOS[name]
    answer = ask(http, url, "video_url")
    assert 400 <= answer.status_code < 500, answer.text
    assert reason in answer.json()["message"], answer.text


FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "a part of an unknown type": ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "input_audio"),
    "no URL": ({"type": "image_url"}, "needs"),
    "an empty URL": ({"type": "image_url", "image_url": {"url": ""}}, "needs"),
    "a number as a URL": ({"type": "image_url", "image_url": {"url": 5}}, "url"),
    "an unknown detail": ({"type": "image_url", "image_url": {"url": "data:,", "detail": "huge"}}, "detail"),
    "the placeholder in the text": ({"type": "text", "text": "<|image_pad|>"}, "placeholder"),
    "a video's placeholder in the text": ({"type": "text", "text": "<|video_pad|><|video_pad|>"}, "placeholder"),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_bad_part_is_refused_with_the_reason(http: httpx.Client, neighbour: Neighbour, name: str) -> None:
    part, reason = FORMS[name]
    answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": [part]}]})
    assert answer.status_code == 400, answer.text
    assert reason in answer.text


def test_too_many_images_and_a_prompt_that_is_too_long_are_refused(http: httpx.Client, neighbour: Neighbour) -> None:
    part = {"type": "image_url", "image_url": {"url": data_url(GOOD)}}
    answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": [part] * 17}]})
    assert answer.status_code == 400 and "16 are the limit" in answer.text
    big = {"type": "image_url", "image_url": {"url": data_url(encoded(picture(512, 512)))}}
    answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": [big] * 16}]})
    assert answer.status_code == 400 and "images included" in answer.text


def test_files_are_read_under_the_allowed_directory_only(
    http: httpx.Client, neighbour: Neighbour, allowed_directory: Path, tmp_path: Path
) -> None:
    (allowed_directory / "a b.png").write_bytes(GOOD)
    (tmp_path / "secret.png").write_bytes(GOOD)
    (allowed_directory / "link.png").symlink_to(tmp_path / "secret.png")
    (allowed_directory / "large.png").write_bytes(bytes(5 << 20))
    assert ask(http, f"file://{allowed_directory}/a%20b.png").status_code == 200
    for name, reason in (
        ("link.png", "no file under"),
        ("../secret.png", "no file under"),
        ("missing.png", "no file under"),
        (".", "regular file"),
        ("large.png", "MiB"),
    ):
        answer = ask(http, f"file://{allowed_directory}/{name}")
        assert answer.status_code == 400 and reason in answer.text, answer.text


def test_nothing_stays_in_shared_memory(http: httpx.Client, neighbour: Neighbour, server: LiveServer) -> None:
    from shared_files import arrays_of

    assert ask(http, data_url(GOOD)).status_code == 200
    assert arrays_of(server.log_path.parent) == []
