"""A chat template that takes any time, and what it does to other clients, to who leaves, and to the server's end."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import LiveServer

from sglang.embedded import DEFAULT_MODEL_PATH

FOREVER = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
OWN = (Path(DEFAULT_MODEL_PATH) / "chat_template.jinja").read_text()
CHAT = "/v1/chat/completions"
HASTY = (str(Path(__file__).with_name("hasty_launch.py")),)
"""The server, whose templates have `SECONDS`: an endless one takes a whole processor for so long."""
SECONDS = 4


def body(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 1, **fields}


LOOPS = body("loop" + " " * 70_000)
"""Long enough to count as long work."""


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("template") / "loops.jinja"
    path.write_text("{% if messages[0].content.startswith('loop') %}" + FOREVER + "{% endif %}" + OWN)
    return str(path)


@pytest.fixture(scope="module")
def server(template: str) -> Iterator[LiveServer]:
    running = LiveServer("--chat-template", template, launch=HASTY)
    try:
        yield running.wait_up()
    finally:
        running.end()


def sent(server: LiveServer, given: dict[str, Any]) -> socket.socket:
    """A request whose answer nobody has read."""
    request = httpx.Request("POST", server.url + CHAT, json=given)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    client = socket.create_connection(("127.0.0.1", server.port))
    client.sendall(f"{head}Content-Length: {len(request.content)}\r\n\r\n".encode() + request.content)
    return client


def test_other_clients_do_not_wait_for_it(server: LiveServer) -> None:
    refused: list[httpx.Response] = []
    attack = threading.Thread(
        target=lambda: refused.append(httpx.post(server.url + CHAT, json=LOOPS, timeout=300)), daemon=True
    )
    attack.start()
    before = 0
    for number in range(5):
        assert httpx.post(server.url + CHAT, json=body(f"Hi {number}"), timeout=300).status_code == 200
        before += not refused
    assert before, "the first of them, at least, on a machine that has little time for us"
    attack.join(300)
    assert refused[0].status_code == 400 and f"takes more than {SECONDS} s" in refused[0].text


def test_long_work_of_others_does_not_wait_for_a_client_that_has_left(server: LiveServer) -> None:
    clients = [sent(server, LOOPS) for _ in range(3)]
    for client in clients:
        client.close()
    answer = httpx.post(server.url + "/v1/messages/count_tokens", json=body("Hi " * 30_000), timeout=300)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("route", [CHAT, "/v1/responses"])
def test_names_that_the_server_sets_are_refused(server: LiveServer, route: str) -> None:
    fields = {"chat_template_kwargs": {"tools": "x" * 100}}
    given = body("Hi", **fields) if route == CHAT else {"input": "Hi", **fields}
    answer = httpx.post(server.url + route, json=given)
    assert answer.status_code == 400 and "may not set tools" in answer.text


def test_a_server_ends_while_a_template_runs(template: str) -> None:
    server = LiveServer("--chat-template", template)
    try:
        client = sent(server.wait_up(), LOOPS)
        assert httpx.post(server.url + CHAT, json=body("Hi"), timeout=300).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        client.close()
    finally:
        server.end()


def test_a_start_that_loops_in_a_template_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loops.jinja").write_text(FOREVER)
    server = LiveServer("--chat-template", str(tmp_path / "loops.jinja"), launch=HASTY)
    try:
        assert server.wait_exit() == 2
        assert (
            f"the chat template does not compile within {SECONDS} s" in server.log()
            and "--chat-template" in server.log()
        )
        assert "Traceback" not in server.log()
    finally:
        server.end()


def test_a_start_can_be_ended_in_the_middle_of_a_template(tmp_path: Path) -> None:
    (tmp_path / "loops.jinja").write_text(FOREVER)
    server = LiveServer("--chat-template", str(tmp_path / "loops.jinja"))
    try:
        while server.health() != 503:
            assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
    finally:
        server.end()
