"""Fetching: addresses, redirects, and servers that do not behave."""

from __future__ import annotations

import http.server
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.managers.front.media import sources
from sglang.srt.managers.front.media.addresses import is_public
from sglang.srt.managers.front.media.sources import SourceRules, load

RULES = SourceRules(max_bytes=1 << 16, timeout_s=300.0, allow_private=True)
HASTY = replace(RULES, timeout_s=1.0)
BODY = bytes(range(256)) * 16


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        name = self.path.split("?")[0].strip("/")
        try:
            getattr(self, f"answer_{name}", self.answer_file)()
        except OSError:
            pass

    def answer_file(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        self.wfile.write(BODY)

    def redirect(self, location: str) -> None:
        self.send_response(302)
        self.send_header("Location", location)
        self.end_headers()

    def answer_moved(self) -> None:
        self.redirect("/file")

    def answer_circle(self) -> None:
        self.redirect("/circle")

    def answer_elsewhere(self) -> None:
        self.redirect("http://169.254.169.254/latest")

    def answer_to_file(self) -> None:
        self.redirect("file:///etc/passwd")

    def answer_missing(self) -> None:
        self.send_error(404)

    def answer_large(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(1 << 40))
        self.end_headers()

    def answer_endless(self) -> None:
        self.send_response(200)
        self.end_headers()
        while True:
            self.wfile.write(bytes(4096))

    def answer_short(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(2 * len(BODY)))
        self.end_headers()
        self.wfile.write(BODY)

    def answer_drip(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
        for _ in range(100):
            self.wfile.write(b"y")
            time.sleep(0.1)

    def answer_slow(self) -> None:
        self.send_response(200)
        self.end_headers()
        for _ in range(100):
            self.wfile.write(b"y")
            time.sleep(0.1)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def web() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("path", ["file", "moved", "file?a=b c&d=ü"])
def test_a_file_is_fetched(web: str, path: str) -> None:
    assert load(f"{web}/{path.replace(' ', '%20')}", RULES).data == BODY


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("circle", "more than 5 times"),
        ("missing", "status 404"),
        ("large", "MiB"),
        ("endless", "MiB"),
        ("short", "cannot be fetched"),
        ("drip", "within 1 s"),
        ("slow", "within 1 s"),
        ("to_file", "only http and https"),
    ],
)
def test_a_server_that_does_not_behave_is_given_up(web: str, path: str, reason: str) -> None:
    with pytest.raises(RequestError) as refused:
        load(f"{web}/{path}", HASTY if "within" in reason else RULES)
    assert reason in refused.value.message and refused.value.status_code == 400


def test_nobody_listens() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        with pytest.raises(RequestError, match="cannot be fetched"):
            load(f"http://127.0.0.1:{probe.getsockname()[1]}/x", RULES)


def test_a_redirection_is_checked_like_the_first_address(web: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server counts as public here; where it leads does not."""
    monkeypatch.setattr(sources, "is_public", lambda address: address == "127.0.0.1" or is_public(address))
    strict = replace(RULES, allow_private=False)
    assert load(f"{web}/moved", strict).data == BODY
    with pytest.raises(RequestError, match="not public"):
        load(f"{web}/elsewhere", strict)


def test_a_name_is_resolved_once(web: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that answers otherwise the second time leads nowhere."""
    answers = iter([["127.0.0.1"]])
    monkeypatch.setattr(sources, "resolve", lambda host, port: next(answers))
    port = web.rpartition(":")[2]
    assert load(f"http://pictures.example:{port}/file", RULES).data == BODY


def test_a_name_server_that_does_not_answer_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of a download counts from its begin, and later look-ups are not kept waiting by earlier ones."""
    answers = threading.Event()
    monkeypatch.setattr(sources, "resolve", lambda host, port: ["127.0.0.1"] if answers.wait(300) else [])
    rules = SourceRules(max_bytes=1 << 16, timeout_s=0.05, allow_private=True)
    for _ in range(3):
        with pytest.raises(RequestError, match="not fetched within 0.05 s"):
            load("http://pictures.example/file", rules)
    assert not answers.is_set()
    answers.set()


def test_only_the_domains_that_are_allowed_are_asked(web: str) -> None:
    rules = SourceRules(max_bytes=1 << 16, timeout_s=1.0, allow_private=True, domains=("example.org", "127.0.0.1"))
    assert load(f"{web}/file", rules).data == BODY
    for host in ("badexample.org", "example.org.evil.net", "[::1]"):
        with pytest.raises(RequestError, match="allowed-media-domains"):
            load(f"http://{host}/x", rules)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("127.0.0.1", False),
        ("0.0.0.0", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.0.1", False),
        ("100.64.0.1", False),
        ("169.254.169.254", False),
        ("224.0.0.1", False),
        ("239.1.1.1", False),
        ("240.0.0.1", False),
        ("255.255.255.255", False),
        ("::", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fc00::1", False),
        ("ff02::1", False),
        ("::ffff:10.0.0.1", False),
        ("::ffff:8.8.8.8", True),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::808:808", True),
        ("64:ff9b:1::808:808", False),
        ("2002:7f00:1::", False),
        ("2001:0:4136:e378:8000:63bf:80ff:fffe", False),
        ("2002:808:808::", False),
        ("168.63.129.16", False),
        ("168.63.129.17", True),
        ("192.0.0.192", False),
        ("192.0.1.1", True),
        ("192.88.99.1", False),
        ("192.175.48.6", False),
        ("198.19.255.255", False),
        ("161.26.0.10", False),
        ("fec0::1", False),
        ("feff::1", False),
        ("3fff::1", False),
        ("3fff:fff:ffff::1", False),
        ("5f00::1", False),
        ("100::1", False),
        ("100:0:0:1::1", False),
        ("2001:2::1", False),
        ("2001:20::1", False),
        ("2001:db8::1", False),
        ("2620:4f:8000::1", False),
        ("::8.8.8.8", False),
        ("4000::1", False),
        ("2606:4700:4700::1111", True),
        ("2001:4860:4860::8888", True),
    ],
)
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert is_public(address) is public
