"""Streaming responses and disconnect handling on plain ASGI.

A stream costs one write a chunk, without task groups, a task to wake or validation, because a busy server sends tens of
thousands of chunks a second.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sglang.srt.entrypoints.http_errors import ApiError, error_event
from sglang.srt.entrypoints.long_json import chunks
from sglang.srt.entrypoints.long_outputs import LONG_OUTPUT, in_thread
from sglang.srt.environ import envs
from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.utils.json_list import Pieces

logger = logging.getLogger(__name__)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

BODY_WRITER = "sglang.body_writer"
"""Scope key of the connection's own BodyWriter, which saves chunks the way through all middleware, and awaits."""

DONE = b"data: [DONE]\n\n"
EVENT_LENGTH = 8
"""Characters that take as long to write as an event takes besides its text."""

Events = bytes | Pieces
"""Complete events, possibly none."""


class StreamForm(NamedTuple):
    """Format of a stream. `keep_alive`: sent during a long silence, so that no proxy closes the connection; empty:
    nothing."""

    media_type: bytes
    keep_alive: bytes


SSE = StreamForm(b"text/event-stream; charset=utf-8", b": keep-alive\n\n")
NDJSON = StreamForm(b"application/x-ndjson", b"")


class ClientDisconnected(Exception):
    """Raised when the client left before its response began."""


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Task[Any]) -> None:
    """Cancels the task and waits until its clean-up has finished."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`. Cancels it and raises ClientDisconnected when the client disconnects."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnected
    finally:
        watcher.cancel()
        if not task.done():
            await _cancel(task)


class BodyWriter(Protocol):
    """Writes chunks of a body whose head has been sent."""

    def write(self, body: bytes) -> bool:
        """Returns whether the next chunk may be written at once. If not, `drain` comes first."""

    async def drain(self) -> None:
        """Waits until the client has taken what was written."""


class _AsgiWriter:
    """BodyWriter that works with any server."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._body = b""

    def write(self, body: bytes) -> bool:
        self._body += body
        return False

    async def drain(self) -> None:
        body, self._body = self._body, b""
        if body:
            await self._send({"type": "http.response.body", "body": body, "more_body": True})


class Outputs(Protocol[T_co]):
    """A source of outputs that must be closed, such as a GenerationStream."""

    async def forward(self, take: Callable[[T_co], bool]) -> bool:
        """Calls `take` with each output until the end, then returns True; or until `take` returns False, then returns
        False."""

    async def aclose(self) -> None:
        """Ends the generation."""


class Generated(Generic[T]):
    """Outputs from an asynchronous generator."""

    def __init__(self, generator: AsyncGenerator[T, None]) -> None:
        self._generator = generator

    async def forward(self, take: Callable[[T], bool]) -> bool:
        async for output in self._generator:
            if not take(output):
                return False
        return True

    async def aclose(self) -> None:
        await self._generator.aclose()


def _short(_: object) -> int:
    return 0


class EventStream(Response, Generic[T]):
    """A response that is sent as it is produced, as server-sent events unless `form` says otherwise.

    `first` holds events that exist already. `outputs` yields the rest, and `write` turns each into complete events: in
    a thread where its `length` is more than LONG_OUTPUT, and then they are sent in pieces; after as much of several
    outputs other callbacks have their turn. `end` returns the events before `done`, which closes every stream.
    `outputs` is closed at the end, also when the client disconnects. An error of it becomes an error event, which
    `fail` writes: by default in the shape of the route `path`.
    """

    def __init__(
        self,
        first: Events,
        outputs: Outputs[T],
        write: Callable[[T], Events],
        path: str,
        end: Callable[[], bytes] = bytes,
        done: bytes = DONE,
        fail: Callable[[ApiError], bytes] | None = None,
        form: StreamForm = SSE,
        length: Callable[[T], int] = _short,
    ) -> None:
        super().__init__(b"", 200)
        no_store = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        self.raw_headers = [(b"content-type", form.media_type), *no_store]
        self._form = form
        self._num_sent = 0
        self._inside_event = False
        """Whether a part of an event was written and the rest will be."""
        self._first = first
        self._outputs = outputs
        self._write = write
        self._end = end
        self._path = path
        self._done = done
        self._fail = fail or partial(error_event, path)
        self._length = length

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer: BodyWriter = scope.get(BODY_WRITER) or _AsgiWriter(send)
        pump = asyncio.ensure_future(self._pump(send, writer))
        watcher = asyncio.ensure_future(_disconnected(receive))
        companion = asyncio.ensure_future(self._keep_alive(writer))
        try:
            await asyncio.wait({pump, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            watcher.cancel()
            await _cancel(companion)
            if not pump.done():
                await _cancel(pump)

    async def _keep_alive(self, writer: BodyWriter) -> None:
        """Sends the keep-alive after each long silence once the stream has begun."""
        num_sent = 0
        while self._form.keep_alive:
            await asyncio.sleep(envs.SGLANG_SSE_KEEP_ALIVE)
            if num_sent == self._num_sent and num_sent:
                await writer.drain()
                if not self._inside_event:
                    writer.write(self._form.keep_alive)
                    await writer.drain()
            num_sent = self._num_sent

    async def _pump(self, send: Send, writer: BodyWriter) -> None:
        waiting: list[T] = []

        def send_on(events: bytes) -> bool:
            if not events:
                return True
            self._num_sent += 1
            return writer.write(events)

        written = 0
        """Length of what was written since the last pause."""

        def take(output: T) -> bool:
            nonlocal written
            length = self._length(output)
            if length > LONG_OUTPUT:
                waiting.append(output)
                return False
            written += length + EVENT_LENGTH
            events = self._write(output)
            return send_on(events if isinstance(events, bytes) else b"".join(events)) and written <= LONG_OUTPUT

        async def send_pieces(events: Events) -> None:
            self._inside_event = True
            for chunk in chunks([events] if isinstance(events, bytes) else events):
                send_on(chunk)
                await writer.drain()
                await asyncio.sleep(0)  # a client that reads at once leaves nothing to wait for
            self._inside_event = False

        async with aclosing(self._outputs) as outputs:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            self._num_sent = 1
            try:
                if self._first:
                    await send_pieces(self._first)
                while not await outputs.forward(take):
                    await writer.drain()
                    if waiting:
                        await send_pieces(await in_thread(partial(self._write, waiting.pop())))
                    await asyncio.sleep(0)  # `drain` returns at once if the client reads
                    written = 0
                last = self._end()
            except RequestError as error:
                last = self._fail(ApiError(error.status_code, error.message))
            except Exception:
                logger.exception("a stream on %s failed", self._path)
                last = self._fail(ApiError(500, "internal error while streaming"))
            await send({"type": "http.response.body", "body": last + self._done, "more_body": False})
