"""Streaming responses and disconnect handling on plain ASGI.

A stream costs one `await send` a chunk; no task groups and no per-chunk validation, because a busy server sends tens of
thousands of chunks a second.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sglang.srt.entrypoints.http_errors import ApiError, sse_error
from sglang.srt.managers.front.generate_request import RequestError

logger = logging.getLogger(__name__)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

DIRECT_SEND = "sglang.send"
"""Scope key of the server's own `send`: body chunks of a stream need not pass every middleware again."""

DONE = b"data: [DONE]\n\n"

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ClientDisconnected(Exception):
    """The client went away before its response began."""


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Task[Any]) -> None:
    """Cancel and wait, so that the work's own clean-up has finished on return."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client disconnects. Raises ClientDisconnected then."""
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


class ClosableOutputs(Protocol[T_co]):
    """An asynchronous iterator that must be closed, such as a GenerationStream or an asynchronous generator."""

    def __aiter__(self) -> AsyncIterator[T_co]: ...

    async def aclose(self) -> None: ...


class EventStream(Response, Generic[T]):
    """A `text/event-stream` response.

    `first` holds events that exist already. `outputs` yields the rest, `write` turns each into complete events
    (possibly none), and `end` makes the events before `done`, which closes every stream. `outputs` is closed at the
    end, also when the client disconnects. What it raises becomes an error event, which `fail` writes: by default in the
    shape of the route `path`.
    """

    def __init__(
        self,
        first: bytes,
        outputs: ClosableOutputs[T],
        write: Callable[[T], bytes],
        path: str,
        end: Callable[[], bytes] = bytes,
        done: bytes = DONE,
        fail: Callable[[ApiError], bytes] | None = None,
    ) -> None:
        super().__init__(b"", 200)
        self.raw_headers = list(_HEADERS)
        self._first = first
        self._outputs = outputs
        self._write = write
        self._end = end
        self._path = path
        self._done = done
        self._fail = fail or partial(sse_error, path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(send, scope.get(DIRECT_SEND, send)))
        watcher = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({pump, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            watcher.cancel()
            if not pump.done():
                await _cancel(pump)

    async def _pump(self, send: Send, direct: Send) -> None:
        async with aclosing(self._outputs) as outputs:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if self._first:
                await direct({"type": "http.response.body", "body": self._first, "more_body": True})
            write = self._write
            try:
                async for output in outputs:
                    events = write(output)
                    if events:
                        await direct({"type": "http.response.body", "body": events, "more_body": True})
                last = self._end()
            except RequestError as error:
                last = self._fail(ApiError(error.status_code, error.message))
            except Exception:
                logger.exception("a stream on %s failed", self._path)
                last = self._fail(ApiError(500, "internal error while streaming"))
            await direct({"type": "http.response.body", "body": last + self._done, "more_body": False})
