"""`python launch.py FLAGS`: a server that plays a script; see scheduler.py. With SCRIPTED_REQUESTS, the path of a file,
each request is a JSON line there: what the client sent, and the status that it got."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the scheduler's process, too

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scripted.scheduler import ENTRY
from sglang.launch_server import report_user_errors, serve
from sglang.srt.entrypoints import http_server
from sglang.srt.managers import launch

REQUESTS = "SCRIPTED_REQUESTS"


class Recorder:
    """Writes down each request that passes."""

    def __init__(self, app: ASGIApp, path: str) -> None:
        self._app, self._path = app, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pieces: list[bytes] = []
        status = 0

        async def receive_and_keep() -> Message:
            message = await receive()
            pieces.append(message.get("body", b""))
            return message

        async def send_and_look(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive_and_keep, send_and_look)
        finally:
            if scope["type"] == "http" and scope["path"] != "/health":
                self._write(scope, b"".join(pieces), status)

    def _write(self, scope: Scope, body: bytes, status: int) -> None:
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        query = scope["query_string"].decode()
        line = {"method": scope["method"], "path": scope["path"], "query": query, "headers": headers, "status": status}
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps({**line, "body": json.loads(body) if body else None}) + "\n")


if __name__ == "__main__":
    launch.SCHEDULER_ENTRY = ENTRY
    if path := os.environ.get(REQUESTS):
        create_app = http_server.create_app
        http_server.create_app = lambda state: Recorder(create_app(state), path)
    sys.exit(report_user_errors(lambda: serve(None, "launch")))
