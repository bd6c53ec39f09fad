"""A small HTTP/1.1 client for load tests.

The client shares the machine with the server, so it is made cheap: an event costs a few microseconds (a C parser and no
coroutine switch a chunk), and carries the arrival time of its bytes.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

EventHandler = Callable[[bytes, float], None]
"""Called with the payload of a server-sent event (what follows `data: `) and its time of arrival (perf_counter)."""


class HttpError(Exception):
    """Raised when the server could not be reached, answered with an error status, or broke off."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of requests, and headers that all of them carry."""

    host: str
    port: int
    tls: bool
    path_prefix: str
    headers: tuple[tuple[str, str], ...]

    @staticmethod
    def parse(base_url: str, headers: Mapping[str, str]) -> Endpoint:
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or url.hostname is None:
            raise ValueError(f"expected a URL such as http://127.0.0.1:30000, got {base_url!r}")
        tls = url.scheme == "https"
        port = url.port or (443 if tls else 80)
        return Endpoint(url.hostname, port, tls, url.path.rstrip("/"), tuple(headers.items()))

    def head(self, method: str, path: str, body_length: int) -> bytes:
        """Returns the head of an HTTP request."""
        lines = [
            f"{method} {self.path_prefix}{path} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            "Connection: close",
            *(f"{name}: {value}" for name, value in self.headers),
        ]
        if method == "POST":
            lines += ["Content-Type: application/json", f"Content-Length: {body_length}"]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


class _Exchange(asyncio.Protocol):
    """One request and its response. httptools calls the `on_*` methods."""

    def __init__(self, request: bytes, on_event: EventHandler | None) -> None:
        self._request = request
        self._on_event = on_event
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0
        self._tail = b""
        self._body: list[bytes] = []
        self._transport: asyncio.WriteTransport | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.status = 0

    @property
    def body(self) -> bytes:
        return b"".join(self._body)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's does not say that it is one
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish(HttpError(f"not an HTTP response: {error}"))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, part: bytes) -> None:
        if self._on_event is None or self.status != 200:
            self._body.append(part)
            return
        *events, self._tail = (self._tail + part).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):
                self._on_event(event[6:], self._now)

    def on_message_complete(self) -> None:
        self._finish(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._finish(HttpError(f"the server closed the connection{f': {error}' if error else ''}"))

    def _finish(self, error: Exception | None) -> None:
        if self._transport is not None:
            self._transport.close()
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


async def send(
    endpoint: Endpoint,
    method: str,
    path: str,
    body: Any = None,
    on_event: EventHandler | None = None,
    timeout_s: float = 6 * 3600,
) -> bytes:
    """Returns the response body; with `on_event`, events go there and the body is empty. Raises HttpError."""
    content = b"" if body is None else json.dumps(body).encode()
    request = endpoint.head(method, path, len(content)) + content
    loop = asyncio.get_running_loop()
    context = ssl.create_default_context() if endpoint.tls else None
    try:
        transport, exchange = await loop.create_connection(
            lambda: _Exchange(request, on_event), endpoint.host, endpoint.port, ssl=context
        )
    except OSError as error:
        raise HttpError(f"cannot connect to {endpoint.host}:{endpoint.port}: {error}") from None
    try:
        await asyncio.wait_for(exchange.done, timeout_s)
    except asyncio.TimeoutError:
        raise HttpError(f"no complete answer within {timeout_s:g} s") from None
    finally:
        transport.close()
    if exchange.status != 200:
        raise HttpError(f"HTTP {exchange.status}: {exchange.body[:500].decode(errors='replace')}")
    return exchange.body


async def get_json(endpoint: Endpoint, path: str, timeout_s: float = 30) -> Any:
    """Returns the JSON answer of a GET. Raises HttpError."""
    return json.loads(await send(endpoint, "GET", path, timeout_s=timeout_s))
