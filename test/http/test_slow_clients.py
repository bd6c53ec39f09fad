"""Requests that never end, against the server's protocol and an application that echoes.

The event loop has a clock of its own (`ClockOfWork`), so that a busy machine never passes a limit of the protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn

from sglang.srt.entrypoints.http_protocol import HttpProtocol

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"
PATIENCE_S = 300.0
"""Of the tests; the limits are far below."""


class ClockOfWork(selectors.DefaultSelector):
    """Seconds that pass only while the sockets are silent: a timer that is due next is then due at once."""

    silence_s = 0.02
    """In real time. Both ends of a connection are in this process, so what one sent has reached the other by then."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(None)
        events = super().select(min(timeout, self.silence_s))
        if not events:
            self.now += max(timeout, 0.0)
        return events


def loop_with_its_clock() -> asyncio.AbstractEventLoop:
    selector = ClockOfWork()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    return loop


class HurriedProtocol(HttpProtocol):
    head_limit_s = 0.8
    body_limit_s = 0.8
    unread_limit_s = 0.8
    max_head_bytes = 20_000


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers `slow` in two pieces, which take longer together than a request may, and `more` without an end."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        more = message["more_body"]
    if scope["path"] == "/headers":
        body = b" ".join(name for name, _ in scope["headers"])
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if body == b"slow":
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await asyncio.sleep(4 * HurriedProtocol.head_limit_s)
    if body == b"more":
        left = asyncio.ensure_future(receive())
        while not left.done():
            await send({"type": "http.response.body", "body": b"x" * (1 << 16), "more_body": True})
            await asyncio.sleep(0)
        return
    await send({"type": "http.response.body", "body": body, "more_body": False})


Client = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def served(client: Client) -> None:
    async def work() -> None:
        config = uvicorn.Config(echo, http=HurriedProtocol, log_config=None, lifespan="off", port=0)
        server = uvicorn.Server(config)
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            await asyncio.wait_for(client(reader, writer), PATIENCE_S)
        finally:
            writer.close()
            server.should_exit = True
            await serving

    with asyncio.Runner(loop_factory=loop_with_its_clock) as runner:
        runner.run(work())


@pytest.mark.parametrize(
    ("sent", "status"),
    [(b"", b""), (b"POST / HTTP/1.1\r\nHost", b"HTTP/1.1 408"), (HEAD + b"ab", b"")],
    ids=["nothing", "headers", "body"],
)
def test_what_never_ends_is_given_up(sent: bytes, status: bytes) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        answer = await reader.read()
        assert answer.startswith(status) and bool(answer) == bool(status)

    served(client)


@pytest.mark.parametrize(
    ("start", "drop"),
    [(b"GET / HTTP/1.1\r\n", b"X-A: b\r\n"), (HEAD.replace(b"4", b"400000"), b"x")],
    ids=["headers", "body"],
)
def test_a_drop_now_and_then_does_not_help(start: bytes, drop: bytes) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def drip() -> None:
            writer.write(start)
            while not writer.is_closing():
                writer.write(drop)
                with contextlib.suppress(ConnectionError):
                    await writer.drain()
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        with contextlib.suppress(ConnectionError):
            await reader.read()
        dripping.cancel()

    served(client)


def test_a_head_without_end_is_too_large() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET / HTTP/1.1\r\nX-A: " + b"b" * 30_000)
        assert (await reader.readline()).startswith(b"HTTP/1.1 431")

    served(client)


@pytest.mark.parametrize("line", [b"b" * 5_000, b"X: b\r\n" * 800], ids=["one", "many"])
def test_trailers_without_end_are_too_large(line: bytes) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX-A: b")
        count = 0
        with contextlib.suppress(ConnectionError):
            while count < 1000 and not reader.at_eof():
                writer.write(line)
                await writer.drain()
                count += 1
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(reader.read(1), 0.001)
        assert count * len(line) < 10 * HurriedProtocol.max_head_bytes

    served(client)


def test_trailers_are_no_headers() -> None:
    """What a gate has checked stays as it was."""

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST /headers HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n")
        writer.write(b"X-Late: b\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        answer = await reader.readuntil(b"0\r\n\r\n")
        assert b"transfer-encoding" in answer and b"x-late" not in answer

    served(client)


def test_long_answers_and_later_requests_have_their_time() -> None:
    """A line break behind a request, which some clients send, does not count as a request that is late."""

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for body in (b"slow", b"fast"):
            writer.write(HEAD + body + b"\r\n")
            await reader.readuntil(b"\r\n\r\n")
            answer = await reader.readuntil(b"0\r\n\r\n")
            assert answer.count(b"\r\n") > 2 and body in answer

    served(client)


def test_requests_behind_a_long_answer_wait() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"slow" + HEAD + b"fa")
        assert b"slow" in await reader.readuntil(b"0\r\n\r\n")
        writer.write(b"st")
        assert b"fast" in await reader.readuntil(b"0\r\n\r\n")

    served(client)


def test_an_answer_that_nobody_reads_is_given_up() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"more")
        while not writer.is_closing():  # the next requests wait behind the answer, and fail with the connection
            writer.write(HEAD + b"fast")
            await asyncio.sleep(0.05)

    served(client)


def test_an_answer_that_is_read_slowly_goes_on() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"more")
        for _ in range(8):
            assert len(await reader.readexactly(1 << 20)) == 1 << 20
            await asyncio.sleep(HurriedProtocol.unread_limit_s / 3)

    served(client)
