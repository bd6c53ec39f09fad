"""Responses whose JSON has long parts, such as vectors: they are sent one after the other and never joined.

long = LongJSON()
content = {"data": [{"embedding": long.part([vector_as_json])} for ...]}       # in the order of the JSON
return long.response(content)
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_GAP = b"\0"
"""Stands for a long part; JSON has no such byte."""
_SENT_AT_ONCE = 1 << 20
"""Bytes that are sent before other callbacks may run."""


class LongJSON:
    """Collects the long parts of a response."""

    def __init__(self) -> None:
        self._parts: list[list[bytes]] = []

    def part(self, pieces: list[bytes]) -> msgspec.Raw:
        """Returns what stands in the content for a value, whose JSON is `pieces` together. Call it in the order in
        which the values come in the JSON."""
        self._parts.append(pieces)
        return msgspec.Raw(_GAP)

    def response(self, content: object) -> Response:
        """Returns the response with `content` as JSON."""
        first, *others = msgspec.json.encode(content).split(_GAP)
        pieces = [first]
        for part, other in zip(self._parts, others, strict=True):
            pieces += (*part, other)
        return _PiecesResponse(pieces)


class _PiecesResponse(Response):
    """A response of known length whose body is sent in pieces."""

    def __init__(self, pieces: list[bytes]) -> None:
        super().__init__(media_type="application/json")
        self._pieces = pieces
        self.headers["content-length"] = str(sum(map(len, pieces)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for chunk in _chunks(self._pieces):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _chunks(pieces: list[bytes]) -> Iterator[bytes]:
    """Yields the pieces, several short ones together."""
    waiting, size = list[bytes](), 0
    for piece in pieces:
        waiting.append(piece)
        size += len(piece)
        if size >= _SENT_AT_ONCE:
            yield b"".join(waiting)
            waiting, size = [], 0
    yield b"".join(waiting)
