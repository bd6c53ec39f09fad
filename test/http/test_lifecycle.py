"""How a server starts, refuses to start, drains, and dies."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from live_server import LiveServer, live_server

from sglang.embedded import DEFAULT_MODEL_PATH

LONG = {"prompt": "Once", "max_tokens": 200, "stream": True, "ignore_eos": True}
KEY = {"Authorization": "Bearer secret"}


class Stream:
    """A streamed completion that a thread reads; `begun` is set at its first event."""

    def __init__(self, url: str, **headers: str) -> None:
        self.events: list[str] = []
        self.error: Exception | None = None
        self.begun = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(url, headers))
        self._thread.start()
        assert self.begun.wait(300)

    def _read(self, url: str, headers: dict[str, str]) -> None:
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=LONG, headers=headers, timeout=300) as response:
                for line in response.iter_lines():
                    if line:
                        self.events.append(line.removeprefix("data: "))
                        self.begun.set()
        except httpx.TransportError as error:
            self.error = error

    def join(self) -> list[str]:
        self._thread.join(300)
        assert not self._thread.is_alive()
        return self.events


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.thorough)])
def test_a_second_signal_ends_what_runs(number: signal.Signals) -> None:
    """With an error event, and without waiting for what would be drained."""
    with live_server() as server:
        processes = children(server)
        stream = Stream(server.url)
        assert httpx.post(f"{server.url}/pause_generation", json={"mode": "in_place"}).status_code == 200
        server.process.send_signal(number)
        while server.health() == 200:
            time.sleep(0.005)
        assert server.process.poll() is None
        server.process.send_signal(number)
        events = stream.join()
        assert stream.error is None and events[-1] == "[DONE]"
        error = json.loads(events[-2])["error"]
        assert error["code"] == 503 and "shutting down" in error["message"]
        assert server.wait_exit() == 0
        assert all_gone(processes) and "Traceback" not in server.log()


def test_what_compiles_grammars_starts_with_the_server_and_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has asked for a grammar, and it is in the middle of its start when the server ends."""
    monkeypatch.setenv("SGLANG_GRAMMAR_WARM_UP", "1")
    with live_server(fresh=True) as server:
        for _ in range(1000):
            processes = children(server)
            compilers = [process for process in processes if is_compiler(process)]
            if compilers:
                break
            time.sleep(0.01)
        assert len(compilers) in (1, 2)  # it forks a child that makes the vocabulary
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert all_gone(processes) and "Traceback" not in server.log() and "died" not in server.log()


def is_compiler(process: psutil.Process) -> bool:
    try:
        return "sglang.srt.constrained.compile_process" in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def children(server: LiveServer) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


def all_gone(processes: list[psutil.Process], limit_s: float = 300.0) -> bool:
    _, alive = psutil.wait_procs(processes, limit_s)
    return not alive


def test_start_key_cors_and_drain() -> None:
    server = LiveServer("--api-key", "secret")
    try:
        while (status := server.health()) == 0:
            time.sleep(0.01)
        assert status == 503  # it listens before the model is there
        assert httpx.post(f"{server.url}/v1/completions", json=LONG, headers=KEY).status_code == 503
        server.wait_up()
        print(f"\nstart-up: {server.start_seconds:.1f} s")
        assert "The server is fired up and ready to roll!" in server.log()
        check_key(server.url)
        check_cors(server.url)
        check_drain(server)
    finally:
        server.end()


def check_key(url: str) -> None:
    for path in ("/v1/models", "/server_info", "/generate"):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            answer = httpx.get(url + path, headers=headers)
            assert answer.status_code == 401 and answer.json() == {"error": "Unauthorized"}
    assert httpx.get(f"{url}/v1/models", headers=KEY).status_code == 200
    for path in ("/health", "/health/", "/ready"):
        assert httpx.get(url + path).status_code == 200
    for path in ("/health_generate", "/ping"):
        assert (httpx.get(url + path).status_code, httpx.get(url + path, headers=KEY).status_code) == (401, 200)
    assert httpx.get(f"{url}/metrics").status_code == 404  # not enabled, but not a matter of the key
    assert "secret" not in httpx.get(f"{url}/server_info", headers=KEY).text


def check_cors(url: str) -> None:
    asked = {"Origin": "https://a.page", "Access-Control-Request-Method": "POST"}
    asked["Access-Control-Request-Headers"] = "authorization,content-type"
    preflight = httpx.options(f"{url}/v1/chat/completions", headers=asked)
    assert preflight.status_code == 200 and preflight.headers["access-control-allow-origin"] == "*"
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    for headers in (KEY, {}):
        answer = httpx.get(f"{url}/v1/models", headers={**headers, "Origin": "https://a.page"})
        assert answer.headers["access-control-allow-origin"] == "*"


def check_drain(server: LiveServer) -> None:
    """A running stream ends as it would have; new requests are refused; then the process ends well."""
    processes = children(server)
    stream = Stream(server.url, **KEY)
    server.process.send_signal(signal.SIGTERM)
    while server.health() == 200:
        time.sleep(0.005)
    assert server.health() == 503
    refused = httpx.post(f"{server.url}/v1/completions", json=LONG, headers=KEY)
    assert refused.status_code == 503 and refused.json()["object"] == "error"
    events = stream.join()
    assert events[-1] == "[DONE]" and json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
    assert server.wait_exit() == 0
    assert all_gone(processes) and "Traceback" not in server.log()


@pytest.mark.parametrize("which", ["scheduler", pytest.param("detokenizer", marks=pytest.mark.thorough)])
def test_a_dead_engine_process_ends_the_server(which: str) -> None:
    """The quick run has a dead detokenizer in test/e2e/test_rank_failure.py."""
    with live_server(fresh=True) as server:
        processes = children(server)
        by_size = sorted(processes, key=lambda process: process.memory_info().rss)
        stream = Stream(server.url)
        (by_size[-1] if which == "scheduler" else engine_processes(processes, by_size)[0]).kill()
        health = []
        while status := server.health():
            health.append(status)
            time.sleep(0.02)
        assert server.wait_exit() == 1
        assert 503 in health
        events = stream.join()
        assert stream.error is not None or "error" in json.loads(events[-2])
        assert f"the {which} process died (killed by SIGKILL)" in server.log()
        assert all_gone(processes)


def engine_processes(processes: list[psutil.Process], by_size: list[psutil.Process]) -> list[psutil.Process]:
    """The engine's processes by size, without multiprocessing's own helper."""
    return [process for process in by_size if "spawn_main" in " ".join(process.cmdline())]


def test_sigint_during_start_ends_everything() -> None:
    server = LiveServer(fresh=True)
    try:
        while len(processes := children(server)) < 2:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGINT)
        assert server.wait_exit() == 0
        assert all_gone(processes)
    finally:
        server.end()


def test_port_in_use(server: LiveServer) -> None:
    second = LiveServer(port=server.port)
    assert second.wait_exit() == 2
    assert f"cannot listen on 127.0.0.1:{server.port}" in second.log() and "--port" in second.log()
    assert "Traceback" not in second.log() and "fired up" not in second.log()
    assert server.health() == 200


@pytest.fixture
def broken_models(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Directories that are no models that we can serve, by what is wrong."""
    config = json.loads((Path(DEFAULT_MODEL_PATH) / "config.json").read_text())
    contents = {
        "malformed": "{not json",
        "unsupported": json.dumps({**config, "architectures": ["MambaForCausalLM"]}),
        "incomplete": json.dumps({"architectures": config["architectures"]}),
    }
    for name, content in contents.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content)
    (tmp_path / "empty").mkdir()
    yield {name: str(tmp_path / name) for name in (*contents, "empty", "missing")}


@pytest.mark.parametrize(
    ("wrong", "flags", "part"),
    [
        ("missing", (), "missing"),
        ("empty", (), "config.json"),
        ("malformed", (), "config.json"),
        ("unsupported", (), "MambaForCausalLM"),
        ("incomplete", (), "is missing"),
        (None, ("--no-such-flag",), "--no-such-flag"),
        (None, ("--chat-template", "/no/such.jinja"), "/no/such.jinja"),
        (
            None,
            ("--max-total-tokens", "16", "--page-size", "16", "--attention-backend", "trtllm_mha", "--strict-backends"),
            "trtllm_mha",
        ),
    ],
)
def test_start_refused_with_a_reason(
    broken_models: dict[str, str], wrong: str | None, flags: tuple[str, ...], part: str
) -> None:
    model = () if wrong is None else ("--model-path", broken_models[wrong])
    server = LiveServer(*model, *flags)
    try:
        assert server.wait_exit() == 2, server.log()
        assert part in server.log() and "Traceback" not in server.log()
    finally:
        server.end()
