"""Whatever a client sends as an image: a clear 4xx over a real socket, while another client is answered."""

from __future__ import annotations

import base64
import gzip
import http.server
import os
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import LiveServer

from media.launch_seeing import PUBLIC_HERE, TURNING
from media.moving_pictures import sound_file, video_file
from media.pictures import animation, data_url, encoded, picture, png_of_size

GOOD = encoded(picture())
JPEG = encoded(picture(), "JPEG")
TRUNCATED_JPEG = JPEG[: len(JPEG) // 2]
SLOWEST_S = 60.0
"""Of a request beside all of those, on a machine that is busy with other tests, too."""


class Neighbour:
    """A client that asks for text again and again."""

    def __init__(self, url: str) -> None:
        self.slowest, self.count = 0.0, 0
        self._url, self._stop = url, threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        with httpx.Client(base_url=self._url, timeout=300) as client:
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


class Web(http.server.BaseHTTPRequestHandler):
    """A server that the media server may ask, and that means no good."""

    secrets_asked = 0
    inner = ""
    """The URL of a server at 127.0.0.1."""

    def do_GET(self) -> None:
        with suppress(OSError):
            getattr(self, "answer_" + self.path.strip("/").replace("-", "_"))()

    def headed(self, length: int | None = None, mime: str = "image/png") -> None:
        self.send_response(200)
        self.send_header("Content-Type", mime)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def redirect(self, location: str) -> None:
        self.send_response(302)
        self.send_header("Location", location)
        self.end_headers()

    def answer_picture(self) -> None:
        self.headed(len(GOOD))
        self.wfile.write(GOOD)

    def answer_secret(self) -> None:
        Web.secrets_asked += 1
        self.answer_picture()

    def answer_page(self) -> None:
        self.headed(None, "text/html")
        self.wfile.write(b"<!DOCTYPE html><html></html>")

    def answer_to_loopback(self) -> None:
        self.redirect(f"{Web.inner}/secret")

    def answer_to_name_of_loopback(self) -> None:
        self.redirect(f"{Web.inner.replace('127.0.0.1', 'localhost')}/secret")

    def answer_to_cloud_data(self) -> None:
        self.redirect("http://169.254.169.254/latest/meta-data")

    def answer_to_file(self) -> None:
        self.redirect("file:///etc/passwd")

    def answer_in_a_circle(self) -> None:
        self.redirect("/in-a-circle")

    def answer_to_turning(self) -> None:
        self.redirect(f"http://{TURNING}:{self.server.server_address[1]}/secret")

    def answer_large(self) -> None:
        self.headed(1 << 40)

    def answer_endless(self) -> None:
        self.headed()
        while True:
            self.wfile.write(bytes(65536))

    def answer_short(self) -> None:
        self.headed(2 * len(GOOD))
        self.wfile.write(GOOD)

    def answer_slow(self) -> None:
        self.headed()
        for byte in GOOD:
            self.wfile.write(bytes([byte]))
            time.sleep(0.1)

    def answer_slow_head(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
        for _ in range(1000):
            self.wfile.write(b"y")
            time.sleep(0.1)

    def answer_compressed(self) -> None:
        self.send_response(200)
        self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        self.wfile.write(gzip.compress(bytes(1 << 20)))

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def web() -> Iterator[str]:
    """The URL under which the media server finds it."""
    servers = [http.server.ThreadingHTTPServer((address, 0), Web) for address in (PUBLIC_HERE, "127.0.0.1")]
    for server in servers:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
    Web.inner = f"http://127.0.0.1:{servers[1].server_address[1]}"
    yield f"http://web.example:{servers[0].server_address[1]}"
    for server in servers:
        server.shutdown()
        server.server_close()


ANSWERS = {
    "to-loopback": PRIVATE,
    "to-name-of-loopback": PRIVATE,
    "to-cloud-data": PRIVATE,
    "to-file": "only http and https",
    "in-a-circle": "more than 5 times",
    "large": "MiB",
    "endless": "MiB",
    "short": "cannot be fetched",
    "missing": "cannot be fetched",
    "page": "web page",
    "compressed": "in no format",
    "slow": "was not fetched within",
    "slow-head": "was not fetched within",
}


def test_what_other_servers_answer(http: httpx.Client, neighbour: Neighbour, web: str) -> None:
    """All at once: those that are slow keep nobody waiting."""
    assert ask(http, f"{web}/picture").status_code == 200
    with ThreadPoolExecutor(len(ANSWERS)) as executor:
        answers = dict(zip(ANSWERS, executor.map(lambda path: ask(http, f"{web}/{path}"), ANSWERS), strict=True))
    for path, reason in ANSWERS.items():
        assert answers[path].status_code == 400 and reason in answers[path].text, f"{path}: {answers[path].text}"
    assert Web.secrets_asked == 0


def test_a_name_that_changes_leads_nowhere(http: httpx.Client, neighbour: Neighbour, web: str) -> None:
    """The first answer of the name server counts, also behind a redirection; a later one is checked again."""
    port, inner_port = web.rpartition(":")[2], Web.inner.rpartition(":")[2]
    assert ask(http, f"http://{TURNING}:{port}/picture").status_code == 200
    refused = ask(http, f"http://{TURNING}:{inner_port}/secret")
    assert refused.status_code == 400 and PRIVATE in refused.text
    answers = [ask(http, f"{web}/to-turning").status_code for _ in range(2)]
    assert answers == [200, 400] and Web.secrets_asked == 1, "asked at the public address alone"


def test_a_thousand_images_are_refused(http: httpx.Client, neighbour: Neighbour) -> None:
    part = {"type": "image_url", "image_url": {"url": data_url(GOOD)}}
    answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": [part] * 1000}]})
    assert answer.status_code == 400 and "16 are the limit" in answer.text


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


def resident_bytes(server: LiveServer) -> int:
    """Of all processes of the server."""
    total = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):
            if os.getsid(int(status.parent.name)) == server.process.pid:
                found = re.search(r"VmRSS:\s+(\d+)", status.read_text())
                total += int(found[1]) << 10 if found else 0
    return total


def test_memory_returns(http: httpx.Client, neighbour: Neighbour, server: LiveServer) -> None:
    """Whatever was refused twice over: what the first round left warm, the second does not add to."""
    bad = [url for url, _ in IMAGES.values() if url.startswith("data:")]
    sizes = []
    for _ in range(2):
        for url in bad:
            assert 400 <= ask(http, url).status_code < 500
        sizes.append(resident_bytes(server))
    assert 0 < sizes[1] < sizes[0] + (48 << 20), sizes


def test_nothing_stays_in_shared_memory(http: httpx.Client, neighbour: Neighbour, server: LiveServer) -> None:
    from shared_files import arrays_of

    assert ask(http, data_url(GOOD)).status_code == 200
    assert arrays_of(server.log_path.parent) == []
