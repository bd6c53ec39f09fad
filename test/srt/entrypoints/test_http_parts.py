"""Key check, body limit and streamed responses, driven as plain ASGI."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import threading
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.entrypoints import http_middleware, http_native, http_server
from sglang.srt.entrypoints.http_app import OFTEN, create_api
from sglang.srt.entrypoints.http_body import LONG_BODY_BYTES, read_body
from sglang.srt.entrypoints.http_errors import ApiError
from sglang.srt.entrypoints.http_middleware import RequestGate
from sglang.srt.entrypoints.http_server import MAX_OPEN_FILES, bind, without_query
from sglang.srt.entrypoints.http_state import ServerState
from sglang.srt.entrypoints.http_stream import ClientDisconnected, EventStream, Generated, until_disconnect
from sglang.srt.entrypoints.long_outputs import LONG_OUTPUT
from sglang.srt.entrypoints.openai.protocol import CompletionRequest
from sglang.srt.errors import UserError
from sglang.srt.managers.front.generate_request import GenerateRequest, RequestError
from sglang.srt.server_args import ServerArgs
from sglang.srt.upstream_interface import REFUSED_ROUTES


def scope(path: str = "/v1/models", method: str = "GET", **headers: str) -> dict[str, Any]:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "path": path, "method": method, "headers": pairs}


class Exchange:
    """One request: `inbox` feeds receive(), `sent` has what was sent."""

    def __init__(self, *inbox: dict[str, Any]) -> None:
        self.inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for message in inbox:
            self.inbox.put_nowait(message)
        self.sent: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        return await self.inbox.get()

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def read_all(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})


def through_gate(request: dict[str, Any], exchange: Exchange, **options: Any) -> Exchange:
    asyncio.run(RequestGate(read_all, **{"api_key": None, **options})(request, exchange.receive, exchange.send))
    return exchange


EMPTY = {"type": "http.request", "body": b""}


@pytest.mark.parametrize(
    ("request_scope", "status"),
    [
        (scope(), 401),
        (scope(authorization="Bearer wrong"), 401),
        (scope(authorization="secret"), 401),
        (scope(authorization="Bearer sécret"), 401),
        (scope(authorization="Bearer secret"), 200),
        (scope(authorization="bearer secret"), 200),
        (scope(authorization="BEARER  secret"), 200),
        (scope(authorization="Basic secret"), 401),
        (scope(authorization="Bearer"), 401),
        (scope(authorization="Bearer SECRET"), 401),
        (scope(method="OPTIONS"), 200),
        (scope("/health"), 200),
        (scope("/health/"), 200),
        (scope("/health_generate"), 401),
        (scope("/healthy"), 401),
        (scope("/metrics/x"), 401),
        (scope("/page/main.js"), 200),
        (scope("/"), 200),
        (scope("/ready"), 200),
        (scope("/metrics"), 200),
        (scope("/generate"), 401),
    ],
)
def test_api_key(request_scope: dict[str, Any], status: int) -> None:
    exchange = through_gate(request_scope, Exchange(EMPTY), api_key="secret")
    assert exchange.status == status
    assert (exchange.body == b'{"error":"Unauthorized"}') == (status == 401)


USER, ADMIN = {"authorization": "Bearer user"}, {"x_api_key": "root"}
KEYS: list[tuple[dict[str, str], dict[str, str], dict[str, int]]] = [
    # keys of the server; key of the request; status of a route of everybody's and of an administrator's
    ({}, {}, {"/v1/models": 200, "/flush_cache": 200, "/health": 200}),
    ({"api_key": "user"}, USER, {"/v1/models": 200, "/flush_cache": 200}),
    ({"admin_api_key": "root"}, {}, {"/v1/models": 200, "/flush_cache": 401, "/health": 200}),
    ({"admin_api_key": "root"}, ADMIN, {"/v1/models": 200, "/flush_cache": 200}),
    ({"api_key": "user", "admin_api_key": "root"}, {}, {"/v1/models": 401, "/flush_cache": 401}),
    ({"api_key": "user", "admin_api_key": "root"}, USER, {"/v1/models": 200, "/flush_cache": 403}),
    ({"api_key": "user", "admin_api_key": "root"}, ADMIN, {"/v1/models": 401, "/flush_cache": 200}),
]


@pytest.mark.parametrize(("keys", "sent", "statuses"), KEYS)
def test_an_administrators_key(keys: dict[str, str], sent: dict[str, str], statuses: dict[str, int]) -> None:
    for path, status in statuses.items():
        paths = sorted(http_middleware.ADMIN_PATHS) if path == "/flush_cache" else [path]
        for asked in (*paths, paths[0] + "/"):
            exchange = through_gate(scope(asked, **sent), Exchange(EMPTY), **keys)
            assert exchange.status == status, asked
            assert status != 403 or b"--admin-api-key" in exchange.body


def test_what_acts_on_others_is_an_administrators() -> None:
    """A route of the server itself, beside those of clients: each is on one of the lists."""
    of_clients = {"/generate", "/encode", "/classify", "/rerank", "/open_session", "/close_session", "/tokenize"}
    of_clients |= {"/detokenize", "/parse_function_call", "/separate_reasoning", "/v2/rerank"}
    args = ServerArgs(model_path=DEFAULT_MODEL_PATH, device="cpu")
    routes = {r.path for r in create_api(ServerState(args)).routes if (r.methods or set()) & {"POST", "PUT", "DELETE"}}
    ours = {path for path in routes if path in http_middleware.ADMIN_PATHS or not path.startswith(("/v1/", "/api/"))}
    ours -= REFUSED_ROUTES.keys() | of_clients
    assert http_middleware.ADMIN_PATHS - {"/list_external_corpora"} == ours & http_middleware.ADMIN_PATHS
    assert ours <= http_middleware.ADMIN_PATHS, ours - http_middleware.ADMIN_PATHS


@pytest.mark.parametrize(
    ("request_scope", "status"),
    [
        (scope(method="POST", content_type="application/json", content_length="2"), 200),
        (scope(method="POST", content_type="Application/JSON; charset=utf-8", content_length="2"), 200),
        (scope(method="POST", content_type="application/vnd.x+json", content_length="2"), 200),
        (scope(method="POST", content_length="2"), 415),
        (scope(method="POST", transfer_encoding="chunked"), 415),
        (scope("/api/chat", method="POST", content_length="2"), 200),
        (scope(method="POST", content_length="0"), 200),
        (scope(method="POST"), 200),
        (scope(method="POST", content_type="text/plain", content_length="0"), 200),
        (scope(method="POST", content_type="text/plain"), 200),
        (scope(method="GET", content_type="text/plain", content_length="2"), 200),
        (scope(method="POST", content_type="text/plain", content_length="2"), 415),
        (scope(method="POST", content_type="text/json", content_length="2"), 415),
        (scope(method="PUT", content_type="text/plain", content_length="2"), 415),
        (scope(method="POST", content_type="text/plain", transfer_encoding="chunked"), 415),
        (scope("/generate", method="POST", content_type="multipart/form-data; boundary=x", content_length="2"), 415),
    ],
)
def test_content_type(request_scope: dict[str, Any], status: int) -> None:
    exchange = through_gate(request_scope, Exchange(EMPTY))
    assert exchange.status == status
    assert (b"Content-Type: application/json" in exchange.body) == (status == 415)


def test_announced_body_too_large() -> None:
    exchange = through_gate(scope("/v1/completions", content_length="11"), Exchange(), max_body_bytes=10)
    assert exchange.status == 413 and b'"object":"error"' in exchange.body


@pytest.mark.parametrize(("digits", "status"), [("11", 413), ("9", 200), ("", 200)])
def test_a_length_with_thousands_of_zeros(digits: str, status: int) -> None:
    announced = scope("/v1/completions", "POST", content_type="application/json", content_length="0" * 5000 + digits)
    assert through_gate(announced, Exchange(EMPTY), max_body_bytes=10).status == status


def test_unannounced_body_too_large() -> None:
    parts = [{"type": "http.request", "body": b"x" * 6, "more_body": True}] * 2
    with pytest.raises(ApiError) as refused:
        through_gate(scope(), Exchange(*parts), max_body_bytes=10)
    assert refused.value.status == 413


def test_bodies_of_all_requests_together_are_bounded() -> None:
    half = {"type": "http.request", "body": b"x" * 6, "more_body": True}
    end = {"type": "http.request", "body": b"x" * 4}
    gate = RequestGate(read_all, None, max_body_bytes=20, max_bodies_bytes=20)

    async def request(exchange: Exchange) -> Exchange:
        await gate(scope(), exchange.receive, exchange.send)
        return exchange

    async def work() -> None:
        first = Exchange(half)
        answer = asyncio.create_task(request(first))
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as refused:
            await request(Exchange(half, half, half))
        assert refused.value.status == 503
        assert (await request(Exchange(half, end))).status == 200
        first.inbox.put_nowait(end)
        assert (await answer).status == 200
        assert (await request(Exchange(half, half, end))).status == 200

    asyncio.run(work())


@pytest.mark.parametrize(
    ("size", "path", "busy", "times"),
    [
        (1 << 16, "/generate", False, 1),
        (1 << 16, "/generate", True, 0),
        (1 << 23, "/generate", True, 1),
        (0, "/health", False, 0),
    ],
    ids=["at rest", "busy", "busy, after large bodies", "probes"],
)
def test_memory_is_given_back(monkeypatch: pytest.MonkeyPatch, size: int, path: str, busy: bool, times: int) -> None:
    """Once for several bodies, and beside the event loop, which goes on."""
    monkeypatch.setattr(http_middleware, "TRIM_DELAY_S", 0.01)
    threads: list[threading.Thread] = []
    for name in ("trim_allocator", "release_free_memory"):  # under load, and at rest
        monkeypatch.setattr(http_middleware, name, lambda: threads.append(threading.current_thread()))

    async def work() -> None:
        gate = RequestGate(read_all, None)
        under_way = Exchange()
        if busy:
            other = asyncio.create_task(gate(scope(), under_way.receive, under_way.send))
            await asyncio.sleep(0)
        for _ in range(3):
            exchange = Exchange({"type": "http.request", "body": b"x" * size})
            await gate({**scope(), "path": path}, exchange.receive, exchange.send)
        assert not threads, "the memory is still in use when the answer is sent"
        await asyncio.sleep(0.05)
        while len(threads) < times:
            await asyncio.sleep(0.01)
        if busy:
            under_way.inbox.put_nowait({"type": "http.request", "body": b""})
            await other

    asyncio.run(work())
    assert len(threads) == times and threading.main_thread() not in threads


def test_connections_are_not_bounded_by_the_usual_limit_of_a_shell() -> None:
    """A file beside them, such as the page's, can still be opened."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
        http_server._allow_open_files()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert hard == before[1] and soft == (MAX_OPEN_FILES if hard < 0 else min(hard, MAX_OPEN_FILES))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(("hard", "said"), [(64, True), (4096, False), (resource.RLIM_INFINITY, False)])
def test_few_files_are_said_at_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hard: int, said: bool
) -> None:
    """A limit that the process cannot raise itself, with what raises it."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: None)
    http_server._allow_open_files()
    assert ("open 64 files" in caplog.text and "ulimit" in caplog.text) == said


class Source:
    """Yields `chunks`, then waits for ever if `endless`; remembers that it was closed."""

    def __init__(self, chunks: list[bytes], endless: bool = False) -> None:
        self.chunks, self.endless, self.closed = chunks, endless, False

    async def events(self) -> AsyncGenerator[bytes, None]:
        try:
            for chunk in self.chunks:
                yield chunk
            if self.endless:
                await asyncio.Event().wait()
        finally:
            self.closed = True


def test_stream_to_its_end() -> None:
    source, exchange = Source([b"b", b"c"]), Exchange()
    response = EventStream(b"a", Generated(source.events()), bytes.upper, "/generate", end=lambda: b"!")
    asyncio.run(response(scope(), exchange.receive, exchange.send))
    assert [message.get("body") for message in exchange.sent[1:]] == [b"a", b"B", b"C", b"!data: [DONE]\n\n"]
    assert exchange.sent[-1]["more_body"] is False and source.closed


@pytest.mark.parametrize(
    ("error", "event"),
    [
        (RequestError("too slow", 503), b'data: {"error":{"message":"too slow"}}'),
        (KeyError("bug"), b'data: {"error":{"message":"internal error while streaming"}}'),
    ],
)
def test_failure_in_mid_stream_is_an_event(error: Exception, event: bytes) -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"b"
        raise error

    exchange = Exchange()
    asyncio.run(
        EventStream(b"a", Generated(events()), bytes.upper, "/generate")(scope(), exchange.receive, exchange.send)
    )
    assert exchange.body == b"aB" + event + b"\n\ndata: [DONE]\n\n"
    assert exchange.sent[-1]["more_body"] is False


def test_long_outputs_are_written_in_a_thread() -> None:
    """In their place in the stream, the last one as well."""
    source, exchange, threads = Source([b"b", b"LONG", b"c", b"LONG"]), Exchange(), list[threading.Thread]()

    def write(output: bytes) -> bytes:
        threads.append(threading.current_thread())
        return output

    response = EventStream(
        b"a", Generated(source.events()), write, "/generate", length=lambda each: len(each) * LONG_OUTPUT
    )
    asyncio.run(response(scope(), exchange.receive, exchange.send))
    assert exchange.body == b"abLONGcLONGdata: [DONE]\n\n" and source.closed
    assert [thread is threading.main_thread() for thread in threads] == [True, False, True, False]


def test_disconnect_closes_the_source() -> None:
    source, exchange = Source([b"b"], endless=True), Exchange()

    async def run() -> None:
        response = asyncio.ensure_future(
            EventStream(b"a", Generated(source.events()), bytes.upper, "/generate")(
                scope(), exchange.receive, exchange.send
            )
        )
        await asyncio.sleep(0.01)
        assert not source.closed
        exchange.inbox.put_nowait({"type": "http.disconnect"})
        await asyncio.wait_for(response, 5)

    asyncio.run(run())
    assert source.closed and exchange.body == b"aB"


@pytest.mark.parametrize(("length", "is_long"), [(10, False), (LONG_BODY_BYTES, True)])
def test_long_bodies_are_decoded_in_a_thread(length: int, is_long: bool) -> None:
    """Also those with mistakes, whose errors reach the client."""
    sizes: list[int] = []

    async def in_thread(size: int, function: Callable[..., Any], *args: Any) -> Any:
        sizes.append(size)
        return function(*args)

    manager = SimpleNamespace(text=SimpleNamespace(in_thread=in_thread))
    app = SimpleNamespace(state=SimpleNamespace(server=SimpleNamespace(engine=SimpleNamespace(manager=manager))))
    raw = b'{"prompt": "' + b"a" * length + b'"}'
    for body in (raw, raw[:-1]):
        exchange = Exchange({"type": "http.request", "body": body})
        reading = read_body(Request(scope() | {"app": app}, exchange.receive), CompletionRequest)
        if body is raw:
            assert asyncio.run(reading).prompt == "a" * length
        else:
            with pytest.raises(ApiError):
                asyncio.run(reading)
    assert sizes == [len(raw), len(raw) - 1] * is_long


def test_work_is_cancelled_on_disconnect() -> None:
    cancelled = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def run() -> None:
        exchange = Exchange({"type": "http.disconnect"})
        await until_disconnect(Request(scope(), exchange.receive), work())

    with pytest.raises(ClientDisconnected):
        asyncio.run(run())
    assert cancelled


def test_a_probe_that_has_left_asks_for_nothing() -> None:
    left: list[bool] = []

    async def submit(call: GenerateRequest) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            left.append(True)

    args = SimpleNamespace(is_embedding=False)
    awake = SimpleNamespace(asleep=())
    manager = SimpleNamespace(args=args, submit=submit, last_receive_time=0.0, state=awake)
    state = SimpleNamespace(require_engine=lambda: SimpleNamespace(manager=manager))
    app = SimpleNamespace(state=SimpleNamespace(server=state))
    exchange = Exchange({"type": "http.disconnect"})
    with pytest.raises(ClientDisconnected):
        asyncio.run(http_native.health_generate(Request(scope() | {"app": app}, exchange.receive)))
    assert left == [True]


def test_work_result_and_error_pass_through() -> None:
    async def succeed() -> int:
        return 3

    async def fail() -> int:
        raise ApiError(400, "no")

    async def run(work: Any) -> int:
        return await until_disconnect(Request(scope(), Exchange().receive), work)

    assert asyncio.run(run(succeed())) == 3
    with pytest.raises(ApiError):
        asyncio.run(run(fail()))


def test_paths_that_are_asked_often_are_looked_for_first() -> None:
    routes = create_api(ServerState(ServerArgs(model_path=DEFAULT_MODEL_PATH, device="cpu"))).router.routes
    paths = [getattr(route, "path", None) for route in routes]
    first = [path for path in paths if path in OFTEN]
    assert set(first) == OFTEN
    openapi = [path for path in paths if path == "/openapi.json"]  # FastAPI's own comes before all
    assert [path for path in paths if path not in openapi][: len(first)] == first


@pytest.mark.parametrize(
    ("enabled", "status", "message"), [(False, 404, b"--enable-metrics"), (True, 503, b"the server is starting")]
)
def test_metrics_of_a_server_that_starts(enabled: bool, status: int, message: bytes) -> None:
    args = ServerArgs(model_path=DEFAULT_MODEL_PATH, device="cpu", enable_metrics=enabled)
    exchange = Exchange(EMPTY)
    request = scope("/metrics") | {"query_string": b"", "http_version": "1.1", "scheme": "http", "server": ("a", 1)}
    asyncio.run(create_api(ServerState(args))(request, exchange.receive, exchange.send))
    assert exchange.status == status and message in exchange.body


def test_the_access_log_has_no_queries() -> None:
    """Clients put their keys there."""
    line = '%s - "%s %s HTTP/%s" %d'
    args = ("127.0.0.1:5", "GET", "/v1/models?api_key=hush", "1.1", 200)
    record = logging.LogRecord("uvicorn.access", logging.INFO, "", 0, line, args, None)
    assert without_query(record)
    assert record.getMessage() == '127.0.0.1:5 - "GET /v1/models HTTP/1.1" 200'


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        (errno.EADDRINUSE, "Stop the program that uses the port"),
        (errno.EADDRNOTAVAIL, "--host"),
        (errno.EACCES, "1024"),
        (errno.ENOBUFS, "--host"),
    ],
)
def test_a_port_that_cannot_be_had_comes_with_advice(reason: int, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refuses(socket.socket):
        def bind(self, address: Any) -> None:
            raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(socket, "socket", Refuses)
    with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:80: .*{advice}"):
        bind("127.0.0.1", 80)
