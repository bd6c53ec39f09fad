"""JSON with long parts, such as vectors: it is sent a part after the other and never joined.

long = LongJSON()
content = {"data": [{"embedding": long.part([vector_as_json])} for ...]}       # in the order of the JSON
return long.response(content)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sglang.srt.managers.front.generation_stream import GenerationStream
from sglang.srt.utils.json_list import Pieces

logger = logging.getLogger(__name__)

_GAP = b"\0"
"""Stands for a long part; JSON has no such byte."""
_SENT_AT_ONCE = 1 << 20
"""Bytes that are sent before other callbacks may run."""
UNREAD_LIMIT_S, SLOWEST_CLIENT = 300.0, 1 << 20
"""Seconds in which an answer must be read, and the bytes a second for which more are allowed."""


class LongJSON:
    """Collects the long parts of a response."""

    def __init__(self) -> None:
        self._parts: list[Sequence[bytes | bytearray]] = []

    def part(self, pieces: Sequence[bytes | bytearray]) -> msgspec.Raw:
        """Returns what stands in the content for a value, whose JSON is `pieces` together. Call it in the order in
        which the values come in the JSON."""
        return msgspec.Raw(self.gap(pieces))

    def gap(self, pieces: Sequence[bytes | bytearray]) -> bytes:
        """Returns what `part` does, for JSON that is written by hand."""
        self._parts.append(pieces)
        return _GAP

    def pieces(self, encoded: bytes) -> Pieces:
        """Returns JSON with the long parts in their places."""
        first, *others = encoded.split(_GAP)
        pieces: Pieces = [first]
        for part, other in zip(self._parts, others, strict=True):
            pieces += (*part, other)
        return pieces

    def response(self, content: object) -> Response:
        """Returns the response with `content` as JSON."""
        return response_of(self.pieces(msgspec.json.encode(content)))


def response_of(pieces: Pieces) -> Response:
    """Returns the response with this JSON, which is sent in pieces if it is long."""
    if sum(map(len, pieces)) <= _SENT_AT_ONCE:
        return Response(b"".join(pieces), media_type="application/json")
    return PiecesResponse(pieces)


def chunks(pieces: Pieces) -> Iterator[bytes]:
    """Yields the pieces, several short ones together, and takes them out of the list."""
    waiting, size = Pieces(), 0
    pieces.reverse()
    while pieces:
        piece = pieces.pop()
        waiting.append(piece)
        size += len(piece)
        if size >= _SENT_AT_ONCE:
            yield b"".join(waiting)
            waiting, size = [], 0
    yield b"".join(waiting)


class PiecesResponse(Response):
    """A response of known length whose body is sent in pieces. A client that takes much longer than others gets only a
    part."""

    def __init__(self, pieces: Pieces) -> None:
        super().__init__(media_type="application/json")
        self._pieces = pieces
        self.num_bytes = sum(map(len, pieces))
        self.headers["content-length"] = str(self.num_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit_s = UNREAD_LIMIT_S + self.num_bytes / SLOWEST_CLIENT
        try:
            await asyncio.wait_for(self._send(send), limit_s)
        except asyncio.TimeoutError:  # the server closes the connection
            logger.warning("A client did not read an answer of %d MB in %.0f s.", self.num_bytes // 10**6, limit_s)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for chunk in chunks(self._pieces):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def answer_call(stream: GenerationStream, write: Callable[[GenerationStream], Awaitable[Response]]) -> Response:
    """Returns the response that `write` makes of a call. Closes the call's stream: if the answer is long only once it
    has been sent, or will not be, so that its values count among those of all calls until then."""
    try:
        response = await write(stream)
    except BaseException:
        stream.close()
        raise
    if isinstance(response, PiecesResponse):  # which is dropped wherever sending ends
        weakref.finalize(response, _close, asyncio.get_running_loop(), stream).atexit = False
    else:
        stream.close()
    return response


def _close(loop: asyncio.AbstractEventLoop, stream: GenerationStream) -> None:
    """Closes a stream from any thread."""
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(stream.close)
