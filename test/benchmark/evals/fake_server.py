"""A server of OpenAI's API over a real socket, which answers what a function says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from aiohttp import web

Reply = Callable[[str, dict[str, Any]], dict[str, Any] | int]
"""(path, body) -> the choice, or an HTTP status."""


class FakeServer:
    """`port`, the `bodies` that came, and how many requests were open at once."""

    def __init__(self, reply: Reply, completion_tokens: int = 7) -> None:
        self.reply = reply
        self.completion_tokens = completion_tokens
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []
        self.most_open = self._open = 0
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> FakeServer:
        self._thread.start()
        assert self._started.wait(300)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(300)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._loop.run_forever()
        self._loop.run_until_complete(self._runner.cleanup())
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_post("/v1/completions", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self._started.set()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "tiny"}]})

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append((request.path, body))
        self.headers.append(dict(request.headers))
        self._open += 1
        self.most_open = max(self.most_open, self._open)
        await asyncio.sleep(0.01)
        self._open -= 1
        choice = self.reply(request.path, body)
        if isinstance(choice, int):
            return web.Response(status=choice, text='{"message": "no"}')
        usage = {"completion_tokens": self.completion_tokens}
        return web.json_response({"choices": [choice], "usage": usage})
