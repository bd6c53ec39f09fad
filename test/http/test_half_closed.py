"""A client that has sent its last byte and still reads. The first packet of one that leaves looks the same."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn

from sglang.srt.entrypoints.http_protocol import HttpProtocol

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"
PATIENCE_S = 300.0
LATER_S = 0.3
"""By then the server has seen the end of what the client sends."""


class Application:
    """Answers `slow` later, `part` in two parts, `tick` in parts without an end, `wait` never. Takes note of those that
    left."""

    def __init__(self) -> None:
        self.left: asyncio.Queue[bytes] = asyncio.Queue()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        gone = asyncio.ensure_future(receive())
        if body == b"part":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
        if body == b"tick":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while not gone.done():
                await send({"type": "http.response.body", "body": b"tick", "more_body": True})
                await asyncio.sleep(0.01)
        limit_s = {b"fast": 0, b"slow": LATER_S, b"part": LATER_S}.get(body, PATIENCE_S)
        await asyncio.wait({gone}, timeout=limit_s)
        if gone.done():
            await self.left.put(body)
            return
        gone.cancel()
        if body != b"part":
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body, "more_body": False})


Client = Callable[[asyncio.StreamReader, asyncio.StreamWriter, Application], Awaitable[None]]


def served(client: Client, loop: str) -> None:
    async def work() -> None:
        application = Application()
        config = uvicorn.Config(application, http=HttpProtocol, log_config=None, lifespan="off", port=0)
        server = uvicorn.Server(config)
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            await asyncio.wait_for(client(reader, writer, application), PATIENCE_S)
        finally:
            writer.close()
            server.should_exit = True
            await serving

    if loop == "uvloop":
        uvloop = pytest.importorskip("uvloop")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(work())
    else:
        asyncio.run(work())


both_loops = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])


@both_loops
@pytest.mark.parametrize("bodies", [b"slow", b"part", b"slowpart", b"fastslowfast"])
def test_it_gets_its_answers(loop: str, bodies: bytes) -> None:
    """All of them, and then the connection is closed."""

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, application: Application) -> None:
        each = [bodies[i : i + 4] for i in range(0, len(bodies), 4)]
        writer.write(b"".join(HEAD + body for body in each))
        writer.write_eof()
        received = await reader.read()
        assert received.count(b"HTTP/1.1 200") == len(each)
        assert all(body in received for body in each) and application.left.empty()

    served(client, loop)


@both_loops
@pytest.mark.parametrize("body", [b"wait", b"tick"])
@pytest.mark.parametrize("half_first", [False, True])
def test_one_that_leaves_ends_its_request(loop: str, body: bytes, half_first: bool) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, application: Application) -> None:
        writer.write(HEAD + body)
        await asyncio.sleep(0.05)
        if half_first:
            writer.write_eof()
        writer.close()
        assert await application.left.get() == body

    served(client, loop)


@both_loops
@pytest.mark.parametrize("sent", [b"", HEAD[:20], HEAD + b"ab"])
def test_requests_that_can_never_be_complete_end_at_once(loop: str, sent: bytes) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, application: Application) -> None:
        writer.write(sent)
        writer.write_eof()
        assert b"200" not in await reader.read()

    served(client, loop)


@both_loops
def test_an_old_client_gets_no_interim_answer(loop: str) -> None:
    """HTTP/1.0 does not know them; its end cannot be told from its leaving."""

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, application: Application) -> None:
        writer.write(HEAD.replace(b"1.1", b"1.0") + b"slow")
        writer.write_eof()
        assert b"HTTP/1.1 100" not in await reader.read()

    served(client, loop)
