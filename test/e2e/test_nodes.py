"""A server whose ranks run on two machines: here two programs that meet over the loopback interface.

`make test` has a server of tensor parallelism and a machine that is killed; `make thorough` has one of two stages, and
machines that end in other ways.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest
from live_server import LiveServer, free_port
from media.pictures import data_url, encoded
from PIL import Image
from seen_pictures import PICTURES, RIGHT, body, seeing_server, seen
from shared_files import arrays_of

from sglang.embedded import ADAPTERS_PATH

PROMPTS = ("What is 431 + 88?", "The capital of France is", "a b c d e f g h i j k l")
FAILURE_LIMIT_S = 300.0


@contextmanager
def machines(
    *flags: str, second: tuple[str, ...] | None = None, start: Callable[..., LiveServer] = LiveServer
) -> Iterator[list[LiveServer]]:
    """Both machines, with their own flags where `second` is given; nothing of them is left."""
    address = f"127.0.0.1:{free_port()}"
    servers = []
    for rank, own in enumerate((flags, flags if second is None else second)):
        several = ("--nnodes", "2", "--node-rank", str(rank), "--dist-init-addr", address)
        servers.append(start(*several, *own))
    try:
        yield servers
    finally:
        for server in servers:
            server.end()
        for server in servers:
            assert not list(server.log_path.parent.glob("sglang-*")), "sockets are left"


def answers(url: str) -> list[str]:
    body = {"sampling_params": {"max_new_tokens": 24, "temperature": 0.0}}
    return [httpx.post(f"{url}/generate", json={"text": text, **body}, timeout=300).json()["text"] for text in PROMPTS]


def abandon_pictures(server: LiveServer) -> None:
    """Requests with a picture that the server has not seen, whose clients go away at once or while it travels."""
    for number, pause in enumerate((0.0, 0.01, 0.05, 0.2)):
        other = encoded(Image.new("RGB", (160, 128), (10 * number, 90, 90)))
        content = json.dumps(body("What color is this?", PICTURES[0], data_url(other))).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
            client.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + content)
            time.sleep(pause)


def answer_with_adapters(url: str) -> None:
    """Of --lora-paths, and one that every machine reads while serving; one that is sent reaches one machine only."""
    with httpx.Client(base_url=url, timeout=300) as http:

        def said(model: str) -> tuple[int, str]:
            messages = [{"role": "user", "content": "What is 15+27?"}]
            reply = http.post("/v1/chat/completions", json={"model": model, "messages": messages, "temperature": 0})
            answered = reply.status_code == 200
            return reply.status_code, reply.json()["choices"][0]["message"]["content"] if answered else ""

        body = {"lora_name": "twice", "lora_path": f"{ADAPTERS_PATH}/twice"}
        assert http.post("/load_lora_adapter", json=body).json()["success"]
        assert [said(model) for model in ("ahoy", "twice", "m")] == [
            (200, "Ahoy! 15 + 27 = 42"), (200, "15 + 27 = 42\n15 + 27 = 42"), (200, "15 + 27 = 42"),
        ]  # fmt: skip
        assert http.post("/unload_lora_adapter", json={"lora_name": "twice"}).json()["success"]
        assert said("twice")[0] == 404
        sent = {"lora_name": "sent", "config_dict": {}, "serialized_named_tensors": [b64encode(b"12345678{}").decode()]}
        refused = http.post("/load_lora_adapter_from_tensors", json=sent)
        assert refused.status_code == 400 and "every machine" in refused.json()["error_message"]


def eventually(condition: Callable[[], bool], why: str) -> None:
    end = time.monotonic() + FAILURE_LIMIT_S
    while not condition():
        assert time.monotonic() < end, why
        time.sleep(0.05)


@pytest.fixture(scope="module")
def expected() -> list[str]:
    server = seeing_server()
    try:
        return answers(server.wait_up().url)
    finally:
        server.end()


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--tp-size", "2"), id="tp2"),
        pytest.param(("--pp-size", "2"), id="pp2", marks=pytest.mark.thorough),
    ],
)
def test_two_machines_answer_as_one(
    flags: tuple[str, ...], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_DIST_SECRET", "a secret")
    adapters = ("--lora-paths", f"ahoy={ADAPTERS_PATH}/ahoy", "--max-lora-rank", "8", "--served-model-name", "m")
    adapters += ("--allowed-local-lora-path", str(ADAPTERS_PATH))
    with machines(*flags, *adapters, start=seeing_server) as (first, second):
        first.wait_up()
        assert answers(first.url) == expected
        assert answers(first.url) == expected, "with prompts from the cache"
        assert seen(first.url) == RIGHT, "pictures travel"
        abandon_pictures(first)
        assert seen(first.url) == RIGHT
        answer_with_adapters(first.url)
        eventually(lambda: not any(arrays_of(server.log_path.parent) for server in (first, second)), "pixels are left")
        info = httpx.get(f"{first.url}/server_info", timeout=10).text
        assert "a secret" not in info + first.log() + second.log()
        first.process.send_signal(signal.SIGTERM)
        assert first.wait_exit() == 0
        assert second.wait_exit() == 1
        assert "as all do when one does" in second.log()


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)])
def test_a_machine_that_ends_ends_the_server(number: signal.Signals) -> None:
    with machines("--tp-size", "2") as (first, second):
        first.wait_up()
        second.process.send_signal(number)
        assert second.wait_exit() == (-number if number == signal.SIGKILL else 0)
        assert first.wait_exit() == 1
        assert "the scheduler TP0 process failed: " in first.log(), "which says whose connection it lost"


@pytest.mark.thorough
def test_a_machine_that_is_silent_ends_the_server() -> None:
    """As one does whose power or network is gone: nothing closes its connections."""
    with machines("--tp-size", "2", "--watchdog-timeout", "15") as (first, second):
        first.wait_up()
        os.killpg(second.process.pid, signal.SIGSTOP)
        try:
            assert first.wait_exit() == 1
        finally:
            os.killpg(second.process.pid, signal.SIGCONT)
        assert second.wait_exit() == 1


def test_machines_that_are_started_otherwise_are_refused() -> None:
    with machines("--tp-size", "2", second=("--tp-size", "2", "--chunked-prefill-size", "64")) as (first, second):
        assert second.wait_exit() != 0 and first.wait_exit() != 0
        said = "rank 0 (machine 0) and rank 1 (machine 1) are not started alike: chunked_prefill_size: nothing and 64."
        for server in (first, second):
            assert said in " ".join(server.log().split())


def test_machines_with_other_variables_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*flags: str) -> LiveServer:
        monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", flags[flags.index("--node-rank") + 1])
        return LiveServer(*flags)

    with machines("--tp-size", "2", start=start) as servers:
        assert all(server.wait_exit() != 0 for server in servers)
        said = "rank 0 (cpu, machine 0) and rank 1 (cpu, machine 1) cannot share a model: SGLANG_SIMULATE_ACC_LEN: "
        for server in servers:
            assert f"{said}0 and 1." in " ".join(server.log().split())


def test_another_secret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"127.0.0.1:{free_port()}"
    servers = []
    try:
        for rank in range(2):
            monkeypatch.setenv("SGLANG_DIST_SECRET", f"secret {rank}")
            several = ("--tp-size", "2", "--nnodes", "2", "--node-rank", str(rank), "--dist-init-addr", address)
            servers.append(LiveServer(*several, "--watchdog-timeout", "30"))
        assert [server.wait_exit() for server in servers] == [1, 1]
        assert "another SGLANG_DIST_SECRET" in servers[1].log()
    finally:
        for server in servers:
            server.end()


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        several = ("--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{taken.getsockname()[1]}")
        server = LiveServer("--tp-size", "2", *several)
        try:
            assert server.wait_exit() == 2
            assert "with a port that nothing uses" in server.log().replace("\n", " ")
        finally:
            server.end()
