"""A stream's chunks on a real socket: written by the connection's own writer, or by the `send` of any other server."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import numpy as np
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sglang.srt.entrypoints.http_protocol import HttpProtocol
from sglang.srt.entrypoints.http_stream import EventStream
from sglang.srt.managers.front.generate_request import GenerateOutput
from sglang.srt.managers.front.generation_stream import GenerationStream
from sglang.srt.managers.wire.io_struct import FinishReason, TokenizedGenerateReq, TokenMeta
from sglang.srt.sampling.sampling_params import SamplingParams

NUM_OUTPUTS, OUTPUT_CHARS = 40, 1 << 19
"""Together more than sockets hold for a client that does not read."""
LIMIT_S = 300.0


class Application:
    """Answers every request with the stream of one sequence."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.num_events = 0
        self.begin()

    def begin(self) -> None:
        """Answers later requests with a new sequence."""
        request = TokenizedGenerateReq(rid="r", input_ids=np.array([1], np.int32), sampling_params=SamplingParams())
        self.stream = GenerationStream([request], [None], 1, lambda stream: self.closed.set())

    def write(self, output: GenerateOutput) -> bytes:
        self.num_events += 1
        return output.text.encode()

    def push(self, text: str, last: bool = False) -> None:
        finish = FinishReason("stop") if last else None
        self.stream.push(GenerateOutput(0, text, [1], finish, TokenMeta(1, 1), None))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = EventStream(b"first", self.stream, self.write, "/generate", done=b"done")
        await response(scope, receive, send)


@contextlib.asynccontextmanager
async def connection(application: Application, protocol: Any) -> Any:
    server = uvicorn.Server(uvicorn.Config(application, http=protocol, log_config=None, lifespan="off", port=0))
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /generate HTTP/1.1\r\nHost: a\r\n\r\n")
    try:
        yield reader, writer
    finally:
        writer.close()
        server.should_exit = True
        await serving


async def chunk(reader: asyncio.StreamReader) -> bytes:
    size = int(await reader.readline(), 16)
    return (await reader.readexactly(size + 2))[:-2]


@pytest.mark.parametrize("protocol", [HttpProtocol, HttpToolsProtocol])
def test_a_client_that_reads_late_gets_all_of_it(protocol: type[HttpToolsProtocol]) -> None:
    """What it does not take is merged, not queued."""

    async def main() -> None:
        application, texts = Application(), [chr(97 + i % 26) * OUTPUT_CHARS for i in range(NUM_OUTPUTS)]
        async with connection(application, protocol) as (reader, _):
            assert b"chunked" in await reader.readuntil(b"\r\n\r\n")
            assert await chunk(reader) == b"first"
            for text in texts:
                application.push(text, last=text is texts[-1])
                await asyncio.sleep(0)
            parts = []
            while part := await chunk(reader):
                parts.append(part)
            assert b"".join(parts) == "".join(texts).encode() + b"done"
            assert 1 < application.num_events < NUM_OUTPUTS

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_nothing_comes_between_two_answers_of_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client reads the end of an answer after the connection was to be kept alive."""
    monkeypatch.setenv("SGLANG_SSE_KEEP_ALIVE", "0.05")

    async def main() -> None:
        application = Application()
        async with connection(application, HttpProtocol) as (reader, writer):
            assert b"chunked" in await reader.readuntil(b"\r\n\r\n")
            application.push("x" * OUTPUT_CHARS * NUM_OUTPUTS, last=True)
            await asyncio.sleep(0.3)
            while await chunk(reader):
                pass
            application.begin()
            application.push("only", last=True)
            writer.write(b"GET /generate HTTP/1.1\r\nHost: a\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


@pytest.mark.parametrize("protocol", [HttpProtocol, HttpToolsProtocol])
@pytest.mark.parametrize("reads", [False, True])
def test_a_client_that_leaves_ends_the_stream(
    protocol: type[HttpToolsProtocol], reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that leaves while nothing is sent is noticed by what keeps the connection alive."""
    monkeypatch.setenv("SGLANG_SSE_KEEP_ALIVE", "0.2")

    async def main() -> None:
        application = Application()
        async with connection(application, protocol) as (reader, writer):
            assert b"chunked" in await reader.readuntil(b"\r\n\r\n")
            assert await chunk(reader) == b"first"
            application.push("one")
            assert await chunk(reader) == b"one"
            for _ in range(0 if reads else NUM_OUTPUTS):  # until the stream waits for the client
                application.push("x" * OUTPUT_CHARS)
                await asyncio.sleep(0)
            writer.transport.abort()
            await application.closed.wait()
            application.push("more")  # which nobody gets

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))
