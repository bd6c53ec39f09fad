"""Gets the bytes of an image or video from the source that a client names.

All functions here block, so call them in a thread. Only the form of an address is decoded; base64 goes on as it came to
the decoding processes.
"""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import stat
import threading
import time
import urllib.parse
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.managers.front.media.addresses import is_public, resolve
from sglang.srt.managers.front.worker_threads import WorkerThreads

MAX_REDIRECTS = 5
MAX_URL_CHARS = 8192
NAME_THREADS = 16
"""Names that are looked up at a time. A look-up cannot be stopped, so that a slow name server keeps some of these
threads, but none of those that fetch."""
_REDIRECTS = (301, 302, 303, 307, 308)
_PIECE_BYTES = 1 << 16
_SHOWN_CHARS = 128
_HEADERS = {"User-Agent": "sm120-sglang", "Accept": "image/*, video/*, */*;q=0.1", "Accept-Encoding": "identity"}


@dataclass(frozen=True, slots=True)
class SourceRules:
    """Limits for fetching. `domains`: hosts that may be contacted, with their subdomains; None: all. `local_directory`:
    where files of this machine may be; None: nowhere."""

    max_bytes: int
    timeout_s: float
    domains: tuple[str, ...] | None = None
    allow_private: bool = False
    local_directory: str | None = None


@dataclass(frozen=True, slots=True)
class Payload:
    """The file, or with `is_base64` its base64 text. `mime`: its type, if a data URL gives one."""

    data: bytes
    is_base64: bool = False
    mime: str = ""


def load(source: str, rules: SourceRules) -> Payload:
    """Returns the bytes of a source. Raises RequestError 400 with the reason."""
    scheme, colon, rest = source[:16].partition(":")
    scheme = scheme.lower()
    if not colon:
        return _base64(source, rules)
    if scheme == "data":
        return _data_url(source, rules)
    if len(source) > MAX_URL_CHARS:
        raise RequestError(f"a media URL has {len(source)} characters; {MAX_URL_CHARS} are the limit")
    if scheme in ("http", "https"):
        return Payload(fetch(source, rules))
    if scheme == "file":
        return Payload(_local_file(source, rules))
    raise RequestError(
        f"{_shown(source)} is no http, https, data or file URL, and no base64 text of an image or a video"
    )


def is_inline(source: str) -> bool:
    """Returns whether the source is the data itself, so that `load` waits for nobody."""
    scheme, colon, _ = source[:16].partition(":")
    return not colon or scheme.lower() == "data"


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "...")


def _data_url(source: str, rules: SourceRules) -> Payload:
    comma = source.find(",", 0, MAX_URL_CHARS)
    if comma < 0:
        raise RequestError("a data URL has no comma in front of its data")
    mime, *options = source[len("data:") : comma].split(";")
    if "base64" not in (option.strip().lower() for option in options):
        raise RequestError("a data URL of an image or a video must be in base64: data:image/png;base64,...")
    return _base64(source[comma + 1 :], rules, mime.strip().lower())


def _base64(text: str, rules: SourceRules, mime: str = "") -> Payload:
    if not text:
        raise RequestError("an image or a video has no data")
    if len(text) * 3 // 4 > rules.max_bytes + 3:
        raise too_large(rules)
    try:
        return Payload(text.encode("ascii"), True, mime)
    except UnicodeEncodeError:
        raise RequestError("the data of an image or a video is not base64: it has characters beyond ASCII") from None


def too_large(rules: SourceRules) -> RequestError:
    """Returns the error for a file beyond the limit."""
    megabytes = rules.max_bytes >> 20
    return RequestError(f"an image or a video has more than {megabytes} MiB (--media-url-max-file-size-mb)")


# --- files of this machine --------------------------------------------------------------------------------------------


def _local_file(source: str, rules: SourceRules) -> bytes:
    if rules.local_directory is None:
        raise RequestError("file URLs are not read: the server was started without --allowed-local-media-path")
    parts = urllib.parse.urlsplit(source)
    if parts.netloc not in ("", "localhost"):
        raise RequestError(f"{_shown(source)} names a file of another machine; write file:///PATH")
    try:
        path = Path(urllib.parse.unquote(parts.path)).resolve(strict=True)
        inside = path.is_relative_to(Path(rules.local_directory).resolve())
    except (OSError, RuntimeError, ValueError):
        path, inside = Path(), False
    if not inside:  # the same for missing files, so that nobody learns what exists outside
        raise RequestError(f"{_shown(source)} is no file under --allowed-local-media-path")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise RequestError(f"{_shown(source)} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RequestError(f"{_shown(source)} is no regular file")
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(rules.max_bytes + 1)
    if len(data) > rules.max_bytes:
        raise too_large(rules)
    return data


# --- http and https ---------------------------------------------------------------------------------------------------


@cache
def _name_threads() -> WorkerThreads:
    """Returns the threads that ask name servers."""
    return WorkerThreads(NAME_THREADS, "media-names")


class _Connection(http.client.HTTPConnection):
    """A connection to one of `addresses`, whatever the name resolves to by now."""

    def __init__(self, host: str, port: int, addresses: list[str], end: float, context: ssl.SSLContext | None) -> None:
        super().__init__(host, port)
        self._addresses, self._end, self._tls = addresses, end, context
        self.raw: socket.socket | None = None

    def connect(self) -> None:
        failure: OSError = OSError("it has no address")
        for address in self._addresses:
            try:
                self.raw = socket.create_connection((address, self.port), max(0.01, self._end - time.monotonic()))
                break
            except OSError as error:
                failure = error
        else:
            raise failure
        self.sock = self.raw if self._tls is None else self._tls.wrap_socket(self.raw, server_hostname=self.host)

    def cut(self) -> None:
        """Ends another thread's wait. A peer that sends a byte now and then would not trigger any time-out by
        itself."""
        with suppress(OSError):
            for end in (self.sock, self.raw):
                if end is not None:
                    socket.socket.shutdown(end, socket.SHUT_RDWR)


def fetch(url: str, rules: SourceRules) -> bytes:
    """Returns the body that a GET answers with, after at most MAX_REDIRECTS redirections. Raises RequestError."""
    end = time.monotonic() + rules.timeout_s
    for _ in range(MAX_REDIRECTS + 1):
        body, location = _get(url, rules, end)
        if location is None:
            return body
        url = urllib.parse.urljoin(url, location)
    raise RequestError(f"{_shown(url)} is redirected more than {MAX_REDIRECTS} times")


def _get(url: str, rules: SourceRules, end: float) -> tuple[bytes, str | None]:
    """Returns the body, or the location of a redirection."""
    scheme, host, port, path = _checked_url(url, rules)
    addresses = _addresses(url, host, port, rules, end)
    context = ssl.create_default_context() if scheme == "https" else None
    connection = _Connection(host, port, addresses, end, context)
    watch = threading.Timer(max(0.01, end - time.monotonic()), connection.cut)
    watch.daemon = True
    watch.start()
    try:
        connection.request("GET", path, headers=_HEADERS)
        response = connection.getresponse()
        if time.monotonic() >= end:
            raise OSError("time is over")
        location = response.getheader("location")
        if response.status in _REDIRECTS and location:
            return b"", location
        if response.status != 200:
            raise RequestError(f"{_shown(url)} answered with status {response.status}")
        return _body(response, rules, end), None
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        if time.monotonic() >= end:
            raise _timeout(url, rules) from None
        raise RequestError(f"{_shown(url)} cannot be fetched: {str(error) or type(error).__name__}") from None
    finally:
        watch.cancel()
        connection.close()


def _timeout(url: str, rules: SourceRules) -> RequestError:
    return RequestError(f"{_shown(url)} was not fetched within {rules.timeout_s:g} s (--mm-per-request-timeout)")


def _body(response: http.client.HTTPResponse, rules: SourceRules, end: float) -> bytes:
    if (response.length or 0) > rules.max_bytes:
        raise too_large(rules)
    pieces, size = [], 0
    expected = response.length
    while piece := response.read1(_PIECE_BYTES):
        size += len(piece)
        if size > rules.max_bytes:
            raise too_large(rules)
        pieces.append(piece)
    if time.monotonic() >= end:  # a connection that was cut looks like the end of the file
        raise OSError("time is over")
    if expected is not None and size < expected:
        raise http.client.IncompleteRead(b"", expected - size)
    return b"".join(pieces)


def _checked_url(url: str, rules: SourceRules) -> tuple[str, str, int, str]:
    """Returns scheme, host, port and path. Raises RequestError."""
    try:
        parts = urllib.parse.urlsplit(url)
        host = (parts.hostname or "").encode("idna").decode() if not _is_ipv6(parts) else parts.hostname or ""
        port = parts.port
    except (ValueError, UnicodeError):
        raise RequestError(f"{_shown(url)} is no URL") from None
    if parts.scheme not in ("http", "https"):
        raise RequestError(f"{_shown(url)}: only http and https URLs are fetched")
    if not host or any(ord(letter) <= 32 or ord(letter) == 127 for letter in url) or len(url) > MAX_URL_CHARS:
        raise RequestError(f"{_shown(url)} is no URL")
    if parts.username is not None or parts.password is not None:
        raise RequestError("a media URL must not hold a user name or a password")
    if rules.domains is not None and not any(host == name or host.endswith("." + name) for name in rules.domains):
        raise RequestError(f"media are not fetched from {host!r}: --allowed-media-domains does not name it")
    path = urllib.parse.quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
    query = urllib.parse.quote(parts.query, safe="/?%:@!$&'()*+,;=~-._[]")
    return parts.scheme, host, port or (443 if parts.scheme == "https" else 80), path + ("?" + query if query else "")


def _is_ipv6(parts: urllib.parse.SplitResult) -> bool:
    return ":" in (parts.hostname or "")


def _addresses(url: str, host: str, port: int, rules: SourceRules, end: float) -> list[str]:
    """Returns the addresses of a host that may be contacted. Raises RequestError, also if no name server answers until
    `end`."""
    answer = _name_threads().submit(False, lambda _: resolve(host, port))
    try:
        addresses = answer.result(max(0.0, end - time.monotonic()))
    except FutureTimeout:
        answer.cancel()  # it goes on in its thread if it has begun: the system sets no limit
        raise _timeout(url, rules) from None
    except (OSError, UnicodeError):
        raise RequestError(f"the name {host[:256]!r} of a media URL has no address") from None
    allowed = [address for address in addresses if rules.allow_private or is_public(address)]
    if not allowed:
        raise RequestError(
            f"{host[:256]!r} is at an address that is not public, from which no media are fetched; send the file as a "
            "data URL, or start the server with --allow-private-media-urls"
        )
    return allowed
