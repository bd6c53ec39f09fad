"""Bodies of requests that wait for their answer: nothing holds them, and they count no more."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import sys
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import pytest
from forked_servers import forked_children

from sglang.srt.entrypoints import http_app
from sglang.srt.entrypoints.http_middleware import RequestGate
from sglang.srt.entrypoints.http_state import ServerState
from sglang.srt.managers.wire.io_struct import FinishReason
from srt.managers.test_tokenizer_manager import Bench

MARK = "quartzy"
LARGE = MARK + " the" * 1200
"""A text that no answer needs."""
MIN_LARGE = 1024
"""Characters from which a text with the mark is what must not stay."""
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CHAT = {"messages": [{"role": "user", "content": LARGE}], "max_tokens": 4}
ITEMS = [{"role": "user", "content": [{"type": "input_text", "text": LARGE}]}]
IDS = [7] * 1500
"""As JSON larger than what may be left of a body."""

ROUTES: dict[str, dict[str, Any]] = {
    "/generate": {"text": LARGE},
    "/generate batch": {"text": [LARGE, LARGE], "sampling_params": [{"n": 2}, {"n": 2}]},
    "/generate hidden": {"text": LARGE, "return_hidden_states": True},
    "/generate session": {"text": LARGE, "session_params": {"id": "s"}},
    "/v1/completions": {"prompt": LARGE, "max_tokens": 4, "n": 2},
    "/v1/completions batch": {"prompt": [LARGE, LARGE], "max_tokens": 4},
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions tools": {**CHAT, "tools": [TOOL], "n": 2, "parallel_tool_calls": False},
    "/v1/messages": CHAT,
    "/v1/responses": {"input": LARGE, "store": False},
    "/v1/responses kept": {"input": ITEMS},
    "/v1/responses background": {"input": ITEMS, "background": True},
    "/api/chat": {"messages": CHAT["messages"]},
    "/api/generate": {"prompt": LARGE},
    "/api/generate raw": {"prompt": LARGE, "raw": True},
    "/v1/embeddings": {"input": [LARGE, LARGE]},
    "/encode": {"text": LARGE},
    "/v1/score": {"query": LARGE, "items": ["a", "b"], "label_token_ids": [1, 2]},
    "/v1/rerank": {"query": "q", "documents": [LARGE], "return_documents": False},
    "/v2/rerank": {"query": "q", "documents": [LARGE], "return_documents": False},
    "/api/embed": {"input": LARGE},
    "/api/embeddings": {"prompt": LARGE},
}
PAIRS = ("/v1/embeddings", "/v1/score", "/v1/rerank", "/v2/rerank")
STREAMS = ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat",
           "/api/generate")  # fmt: skip
CASES = [(name, streams) for name in ROUTES for streams in (False, True)
         if (not streams or name.split()[0] in STREAMS) and not (streams and "background" in name)]  # fmt: skip


class Call:
    """One request on its way: what was sent, and what came."""

    def __init__(self, path: str, body: bytes) -> None:
        self.path, self.parts = path, [body[i : i + 4096] for i in range(0, len(body), 4096)]
        self.sent: list[dict[str, Any]] = []
        self.left = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        if self.parts:
            part = self.parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self.parts)}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def scope(self) -> dict[str, Any]:
        headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
        return {"type": "http", "method": "POST", "path": self.path, "raw_path": self.path.encode(), "headers": headers,
                "query_string": b"", "http_version": "1.1", "root_path": ""}  # fmt: skip

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def answer(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


class Server:
    """The whole application, and a scheduler that the test plays."""

    def __init__(self, bench: Bench, monkeypatch: pytest.MonkeyPatch, max_bodies_bytes: int) -> None:
        self.bench, self.gates = bench, list[RequestGate]()

        def gate(*args: Any) -> RequestGate:
            self.gates.append(RequestGate(*args, max_bodies_bytes=max_bodies_bytes))
            return self.gates[-1]

        monkeypatch.setattr(http_app, "RequestGate", gate)
        self.state = ServerState(bench.manager.args)
        self.state.connect(bench.manager)
        self.app = http_app.create_app(self.state)
        self.bench.manager.mark_up()
        self.bench.manager.attach()

    @property
    def num_bytes(self) -> int:
        return self.gates[0]._num_bytes

    def begin(self, path: str, body: dict[str, Any]) -> tuple[Call, asyncio.Task[None]]:
        call = Call(path, json.dumps(body).encode())
        return call, asyncio.ensure_future(self.app(call.scope, call.receive, call.send))

    async def rids(self, count: int = 1) -> list[str]:
        """The ids of the sequences that the scheduler got, of which nothing else is kept."""
        requests = [asyncio.ensure_future(self.bench.request()) for _ in range(count)]
        return [(await request).rid for request in requests]

    async def close(self) -> None:
        self.bench.manager.fail_all(RuntimeError("over"))  # type: ignore[arg-type]
        self.state.close()


@contextlib.asynccontextmanager
async def serving(monkeypatch: pytest.MonkeyPatch, limit: int = 1 << 29, **flags: Any) -> AsyncIterator[Server]:
    bench = Bench(enable_return_hidden_states=True, **flags)
    with forked_children():
        server = Server(bench, monkeypatch, limit)
    try:
        yield server
    finally:
        server.state.close()
        bench.close()


def module_values() -> Iterator[Any]:
    """The values of the server's modules, which `gc.get_objects` leaves out once they are frozen, and what their caches
    hold."""
    for name, module in list(sys.modules.items()):
        if name.startswith("sglang."):
            for value in list(vars(module).values()):
                yield value
                if isinstance(value, functools._lru_cache_wrapper):
                    yield from gc.get_referents(value)


@pytest.fixture(scope="module", autouse=True)
def frozen() -> Iterator[None]:
    """What other tests of this process have left is not looked at: it may be millions of objects."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def held_texts() -> list[str]:
    """The types of what refers to large texts with the mark."""
    seen: set[int] = set()
    held = []
    skipped = (types.ModuleType, type, types.CodeType)
    objects = gc.get_objects()  # not spread out into a new list, which it would have found: that would keep them all
    objects.extend(module_values())
    waiting = [entry for entry in objects if not isinstance(entry, skipped)]
    while waiting:
        entry = waiting.pop()
        if id(entry) in seen or entry is waiting or entry is objects:
            continue
        seen.add(id(entry))
        for inner in gc.get_referents(entry):
            if isinstance(inner, str | bytes | bytearray):
                mark = MARK if isinstance(inner, str) else MARK.encode()
                if len(inner) > MIN_LARGE and mark in inner and inner is not LARGE:  # type: ignore[operator]
                    held.append(type(entry).__name__)
            elif (not gc.is_tracked(inner) and isinstance(inner, dict | tuple | list)) or hasattr(
                type(inner), "__struct_fields__"
            ):
                waiting.append(inner)
    return held


async def holders(expected: list[str]) -> list[str]:
    """As `held_texts`, as soon as that is `expected`: a thread that has handed its work over may still have it."""
    for _ in range(100):
        if (held := held_texts()) == expected:
            break
        await asyncio.sleep(0.1)
    return held


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 300))


def num_sequences(name: str) -> int:
    many = {"/generate batch": 4, "/v1/completions": 2, "/v1/completions batch": 2, "/v1/chat/completions tools": 2}
    return many.get(name) or (2 if name.split()[0] in PAIRS else 1)


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    gc.collect()
    yield
    gc.collect()


@pytest.mark.parametrize(("name", "streams"), CASES)
def test_nothing_holds_the_body_of_a_call_that_was_submitted(
    name: str, streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with serving(monkeypatch, is_embedding="rerank" in name) as server:
            if "session" in name:
                server.state.sessions.open(1 << 16, "s")
            body = {**ROUTES[name], "stream": streams} if name.split()[0] in STREAMS else ROUTES[name]
            call, answer = server.begin(name.split()[0], body)
            del body
            rids = await server.rids(num_sequences(name))
            kept = ["HeldInput"] * name.startswith("/v1/responses ")
            assert server.num_bytes == 0
            assert await holders(kept) == kept
            if streams:
                server.bench.send(rids[0], "so", [5])
                while not call.sent:
                    await asyncio.sleep(0.001)
                assert call.status == 200 and server.num_bytes == 0 and await holders(kept) == kept
            call.left.set()
            await answer

    run(work)


def test_more_streams_than_the_limit_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(json.dumps(CHAT))

    async def work() -> None:
        async with serving(monkeypatch, limit=5 * size) as server:
            calls = []
            for _ in range(53):
                call, answer = server.begin("/v1/chat/completions", {**CHAT, "stream": True})
                (rid,) = await server.rids()
                server.bench.send(rid, "so", [5])
                calls.append((call, answer, rid))
            for call, answer, rid in calls:
                server.bench.send(rid, "", [], FinishReason("stop"))
                await answer
                assert call.status == 200 and call.answer.endswith(b"data: [DONE]\n\n")

    run(work)


def test_a_body_that_waits_to_be_tokenized_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with serving(monkeypatch) as server:
            waits = asyncio.Event()

            async def encode(encode: Any, text: str, add_special_tokens: bool = True) -> list[int]:
                await waits.wait()
                return list(await encode(text, add_special_tokens))

            preparer = server.bench.manager.preparer
            monkeypatch.setattr(preparer, "_encode", partial(encode, preparer._encode))
            call, answer = server.begin("/generate", {"text": LARGE})
            while server.num_bytes <= len(LARGE):
                await asyncio.sleep(0.01)
            waits.set()
            await server.rids()
            assert server.num_bytes == 0
            call.left.set()
            await answer

    run(work)
