"""Turns a call into a stream of events, for all forms of the API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.held_body import releases_body
from sglang.srt.entrypoints.http_errors import ApiError
from sglang.srt.entrypoints.http_stream import DONE, SSE, Events, EventStream, StreamForm, until_disconnect
from sglang.srt.entrypoints.long_outputs import LONG_OUTPUT, in_thread, length_of
from sglang.srt.environ import envs
from sglang.srt.managers.front.generate_request import GenerateOutput, GenerateRequest
from sglang.srt.managers.front.generation_stream import GenerationStream
from sglang.srt.managers.front.tokenizer_manager import TokenizerManager


async def _first_output(stream: GenerationStream, limit_s: float | None) -> GenerateOutput | None:
    """Returns the first output; None if there was none in this time and it is still to come."""
    try:
        return await asyncio.wait_for(anext(stream, None), limit_s)
    except asyncio.TimeoutError:
        return None


class StreamWriter(Protocol):
    """Turns the outputs of one call into events."""

    def write(self, output: GenerateOutput) -> Events:
        """Returns the events for one output."""
        ...

    def num_held(self, index: int) -> int:
        """Returns the characters that writing the next output of a sequence may include, besides its own: of earlier
        outputs that were held back, or of an echoed prompt."""
        ...

    def end(self) -> bytes:
        """Returns the events after the last output."""
        ...


def length_written(writer: StreamWriter, output: GenerateOutput) -> int:
    """Returns the characters that take as long to write as the output's events; the event loop is blocked noticeably
    beyond LONG_OUTPUT."""
    return max(length_of(output), writer.num_held(output.index))


async def stream_events(
    manager: TokenizerManager,
    request: Request,
    call: GenerateRequest,
    make_writer: Callable[[GenerationStream], StreamWriter],
    done: bytes = DONE,
    fail: Callable[[ApiError], bytes] | None = None,
    form: StreamForm = SSE,
    begins_with_output: bool = False,
) -> Response:
    """Returns a streamed response, releasing the request's body. An error before the first event is raised, so that it
    gets an HTTP status, unless the wait is so long that the connection must be kept alive; `fail` writes later errors,
    by default as the route's error events. begins_with_output: sends nothing before the first output, however long that
    takes."""
    releases_body(request, call)
    limit_s = envs.SGLANG_SSE_KEEP_ALIVE if form.keep_alive and not begins_with_output else None

    async def start() -> tuple[GenerationStream, StreamWriter, Events]:
        stream = await manager.submit(call)
        try:
            writer = make_writer(stream)
            output = await _first_output(stream, limit_s)
            if output is not None and length_written(writer, output) > LONG_OUTPUT:
                return stream, writer, await in_thread(partial(writer.write, output))
            return stream, writer, b"" if output is None else writer.write(output)
        except BaseException:
            await stream.aclose()
            raise

    stream, writer, first = await until_disconnect(request, start())
    return EventStream(
        first, stream, writer.write, request.url.path, writer.end, done, fail, form, partial(length_written, writer)
    )
