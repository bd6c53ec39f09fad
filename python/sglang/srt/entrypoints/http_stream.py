"""Streaming responses and disconnect handling on plain ASGI.

A stream costs one `await send` a chunk; no task groups and no per-chunk validation, because a busy server sends tens of
thousands of chunks a second.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sglang.srt.entrypoints.http_errors import ApiError, sse_error
from sglang.srt.managers.generate_request import RequestError

logger = logging.getLogger(__name__)

T = TypeVar("T")

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


class EventStream(Response):
    """A `text/event-stream` response: `first` has been produced already, `rest` yields complete events as bytes.

    `rest` is closed at the end, also when the client disconnects. If it raises, the client gets an error event in the
    shape of the route `path`.
    """

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None], path: str) -> None:
        super().__init__(b"", 200)
        self.raw_headers = list(_HEADERS)
        self._first = first
        self._rest = rest
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(send))
        watcher = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({pump, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            watcher.cancel()
            if not pump.done():
                await _cancel(pump)

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if self._first:
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
        last = DONE
        async with aclosing(self._rest) as rest:
            try:
                async for chunk in rest:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except RequestError as error:
                last = sse_error(self._path, ApiError(error.status_code, error.message)) + DONE
            except Exception:
                logger.exception("a stream on %s failed", self._path)
                last = sse_error(self._path, ApiError(500, "internal error while streaming")) + DONE
        await send({"type": "http.response.body", "body": last, "more_body": False})
