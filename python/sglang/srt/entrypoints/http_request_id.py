"""Ids of HTTP requests, in the response headers that clients of both APIs read and report."""

from __future__ import annotations

import re
import uuid

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PREFIX = "req_"
_KEY = "sglang.rid"
_HEADERS = (b"request-id", b"x-request-id")
"""Header names of Anthropic and of OpenAI."""
_GIVEN = re.compile(rb"[!-~]{1,128}")
"""A client's id that is accepted."""


class RequestIds:
    """Adds the client's `x-request-id`, or a new id, to the response; it names the request in the log and for
    aborts."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        rid = uuid.uuid4().hex
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        shown = given if _GIVEN.fullmatch(given) else (PREFIX + rid).encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), *((name, shown) for name in _HEADERS)]
                message = {**message, "headers": headers}
            await send(message)

        await self._app({**scope, _KEY: rid}, receive, send_with_id)


def rid_of(request: Request) -> str:
    """Returns the id for this request's call in the engine."""
    return str(request.scope.get(_KEY) or uuid.uuid4().hex)
