"""Which web pages may use a server: with the complete application, but no engine, whose absence is a 503."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.testclient import TestClient

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.entrypoints.http_app import create_app
from sglang.srt.entrypoints.http_middleware import MAX_HEAD_BYTES
from sglang.srt.entrypoints.http_state import ServerState
from sglang.srt.errors import UserError
from sglang.srt.server_args import ServerArgs

OURS = ["http://localhost", "http://localhost:3000", "https://127.0.0.1:8443", "http://[::1]:5173", "https://LOCALHOST"]
FOREIGN = [
    *("https://evil.example", "http://localhost.evil.example", "http://evil.example:30000", "null", "file://", "", "x"),
    *("http://127.0.0.1.evil.example", "http://localhost:1@evil.example", "http://127.0.0.2", "http://localhost:"),
    *("http://localhost/a", "http://[::1]evil.example", "http://localhost\tx", "h" * 10_000),
]
REACHED = 503


def client(host: str = "127.0.0.1:30000", **flags: Any) -> TestClient:
    args = ServerArgs.from_kwargs(model_path=DEFAULT_MODEL_PATH, device="cpu", **flags)
    return TestClient(create_app(ServerState(args)), base_url=f"http://{host}", raise_server_exceptions=False)


def status(of: TestClient, origin: str, method: str = "POST", path: str = "/abort_request") -> int:
    return of.request(method, path, headers={"origin": origin}, json={"abort_all": True}).status_code


@pytest.mark.parametrize("origin", FOREIGN)
def test_pages_from_elsewhere_are_refused_without_a_key(origin: str) -> None:
    server = client()
    for method, path in (("POST", "/flush_cache"), ("GET", "/v1/models"), ("GET", "/health"), ("GET", "/")):
        reply = server.request(method, path, headers={"origin": origin})
        assert reply.status_code == 403 and "access-control-allow-origin" not in reply.headers
        assert "--allowed-origins" in reply.text and "--api-key" in reply.text and len(reply.text) < 1000
    preflight = {"origin": origin, "access-control-request-method": "POST"}
    assert server.options("/generate", headers=preflight).status_code == 403


@pytest.mark.parametrize("origin", OURS)
def test_pages_of_this_machine_may_use_it(origin: str) -> None:
    server = client()
    reply = server.post("/flush_cache", headers={"origin": origin})
    assert reply.status_code == REACHED and reply.headers["access-control-allow-origin"] == origin
    wanted = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    preflight = server.options("/generate", headers={"origin": origin, **wanted})
    assert preflight.status_code == 200 and preflight.headers["access-control-allow-origin"] == origin


def test_clients_that_are_no_pages_say_no_origin() -> None:
    assert client().post("/flush_cache").status_code == REACHED
    assert client().get("/health").status_code == REACHED


def test_named_pages() -> None:
    named = client(allowed_origins=["https://chat.example", "app://tool"])
    assert status(named, "https://chat.example") == status(named, "app://tool") == REACHED
    assert status(named, "http://localhost:3000") == REACHED
    assert status(named, "https://chat.example:444") == status(named, "https://other.example") == 403
    assert status(client(allowed_origins=["*"]), "https://any.example") == REACHED


def test_the_page_of_the_server_itself() -> None:
    """Also under an address of the network; a name could be anybody's, who lets it point to this machine."""
    for host in ("192.168.1.5:30000", "[fd00::5]:30000", "10.0.0.1"):
        assert status(client(host), f"http://{host}") == REACHED
        assert status(client(host), "http://192.168.1.6:30000") == 403
    assert status(client("gpu.example:30000"), "http://gpu.example:30000") == 403


OTHER_HOSTS = ["evil.example", "evil.example:30000", "127.0.0.1.evil.example", "local.evil.example:1", "evil.example."]
OUR_HOSTS = [
    "127.0.0.1:30000",
    "[::1]:30000",
    "10.1.2.3",
    "localhost",
    "LOCALHOST:1",
    "sglang:30000",
    "a.local",
    "b.internal:1",
]


@pytest.mark.parametrize("host", OTHER_HOSTS)
def test_without_a_key_names_of_others_are_no_host(host: str) -> None:
    """A page's GET of its own server, whose name leads here now, has no Origin."""
    for path in ("/server_info", "/v1/models", "/list_external_corpora"):
        reply = client(host).get(path)
        assert reply.status_code == 403 and "--allowed-origins" in reply.text and "--api-key" in reply.text
    assert client(host).post("/flush_cache").status_code == 403
    assert client(host).get("/health").status_code == REACHED, "probes need no key, either"
    assert client(host, api_key="secret").get("/server_info").status_code == 401
    assert client(host, allowed_origins=["*"]).get("/server_info").status_code == REACHED


@pytest.mark.parametrize("host", OUR_HOSTS)
def test_hosts_of_a_server_without_a_key(host: str) -> None:
    assert client(host).get("/server_info").status_code == REACHED


def ask_with(headers: list[tuple[bytes, bytes]], version: str = "1.1", path: str = "/health") -> tuple[int, bytes]:
    """Status and body of the whole application's answer."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b""}
    args = ServerArgs.from_kwargs(model_path=DEFAULT_MODEL_PATH, device="cpu", api_key="secret")
    app = create_app(ServerState(args))
    asyncio.run(app({**scope, "http_version": version, "headers": headers}, receive, send))
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


def test_a_request_has_one_host() -> None:
    host = (b"host", b"127.0.0.1:30000")
    assert ask_with([host])[0] == REACHED
    assert ask_with([], "1.0")[0] == REACHED
    for headers, version, said in (([], "1.1", b"none"), ([host, host], "1.1", b"2"), ([host] * 3, "1.0", b"3")):
        status, body = ask_with(headers, version)
        assert status == 400 and b"one header Host, this one has " + said in body


@pytest.mark.parametrize(
    "headers",
    [
        [(b"x-a", b"a" * MAX_HEAD_BYTES)],
        [(b"a" * MAX_HEAD_BYTES, b"")],
        [(b"x", b"")] * (MAX_HEAD_BYTES // 5 + 1),
        [(b"x-a", b"a" * (MAX_HEAD_BYTES // 2))] * 2,
    ],
)
def test_all_headers_count(headers: list[tuple[bytes, bytes]]) -> None:
    """However they came: a head that ends within one read is counted, too."""
    status, body = ask_with([(b"host", b"localhost"), *headers])
    assert status == 431 and b"headers are larger than" in body


def test_names_that_are_allowed_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {"allowed_origins": ["https://chat.example:8443", "app://tool"]}
    assert client("Chat.Example", **named).get("/server_info").status_code == REACHED
    assert client("other.example", **named).get("/server_info").status_code == 403
    monkeypatch.setattr("socket.gethostname", lambda: "gpu1.lab.example")
    assert client("gpu1.lab.example:30000").get("/server_info").status_code == REACHED


def test_with_a_key_every_page_may_ask() -> None:
    """The key is what it needs."""
    server = client(api_key="secret")
    headers = {"origin": "https://evil.example"}
    assert server.post("/flush_cache", headers=headers).status_code == 401
    reply = server.post("/flush_cache", headers={**headers, "authorization": "Bearer secret"})
    assert reply.status_code == REACHED and reply.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/", "https://chat.example/a", "", "http://"])
def test_origins_are_checked_at_the_start(origin: str) -> None:
    with pytest.raises(UserError, match="--allowed-origins"):
        ServerArgs.from_kwargs(model_path=DEFAULT_MODEL_PATH, allowed_origins=[origin])
