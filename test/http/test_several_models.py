"""Several models behind one port, as clients see them: two copies of the embedded model with other names and flags."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
import yaml
from live_server import LiveServer
from shared_files import mapped_files

from sglang.embedded import DEFAULT_MODEL_PATH

PAGE = Path(__file__).parents[2] / "docs" / "several_models.md"
MODELS: dict[str, Any] = {
    "first": {"flags": {"model-path": DEFAULT_MODEL_PATH, "max-total-tokens": 2048}, "aliases": ["gpt-4o", "org/name"]},
    "second": {"flags": {"model-path": DEFAULT_MODEL_PATH, "max-total-tokens": 1024, "context-length": 512}},
}
AHOY = Path(DEFAULT_MODEL_PATH).parent / "adapters" / "ahoy"


def started(folder: Path, **more: Any) -> LiveServer:
    file = folder / "models.yaml"
    file.write_text(yaml.safe_dump({"models": MODELS, "min_stay": 0, **more}))
    return LiveServer("--models", str(file), "--model-path", DEFAULT_MODEL_PATH).wait_up()


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    server = started(tmp_path_factory.mktemp("models"))
    try:
        with httpx.Client(base_url=server.url, timeout=300) as client:
            yield client
    finally:
        server.end()


def ask(http: httpx.Client, model: str | None, tokens: int = 8) -> httpx.Response:
    body = {"prompt": "The harbour", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return http.post("/v1/completions", json=body | ({} if model is None else {"model": model}))


def text(http: httpx.Client, model: str | None, tokens: int = 8) -> str:
    reply = ask(http, model, tokens)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def states(http: httpx.Client) -> dict[str, str]:
    return {card["id"]: card["state"] for card in http.get("/v1/models").json()["data"]}


def test_the_request_chooses(http: httpx.Client) -> None:
    expected = text(http, "first")
    assert states(http) == {"first": "awake", "second": "asleep"}
    assert text(http, "second") == expected  # the same weights
    assert states(http) == {"first": "asleep", "second": "awake"}
    assert http.get("/running").json() == {"running": [{"model": "second", "state": "awake"}]}
    assert text(http, "gpt-4o") == text(http, None) == text(http, "org/name") == expected
    assert states(http)["first"] == "awake"
    said = http.post("/v1/chat/completions", json={"model": "third", "messages": []})
    assert (said.status_code, said.json()["code"]) == (404, "model_not_found")
    assert http.get("/v1/models/second").json()["max_model_len"] == 512
    assert http.post("/sleep").status_code == 400
    assert http.post("/v1/completions", content=b"[" * 2000, headers={"content-type": "application/json"}).is_error
    assert http.get("/health").status_code == 200


def test_what_computes_nothing_wakes_nobody(http: httpx.Client) -> None:
    text(http, "first")
    assert http.post("/v1/batches", json={"model": "second"}).status_code == 404
    assert http.post("/upstream/second/flush_cache").status_code == 200
    for name in ("second:ahoy", "gpt-4o:ahoy", "second:"):  # no model here takes adapters
        assert ask(http, name).json()["code"] == "model_not_found"
    assert http.post("/api/models/unloadsecond").status_code == 404
    assert http.get("/v1/models/second:ahoy").status_code == 404
    assert http.get("/v1/models/second:latest").json()["id"] == "second"
    assert states(http) == {"first": "awake", "second": "asleep"}
    assert {each["name"] for each in http.get("/api/tags").json()["models"]} == {"first", "second"}
    assert {each["name"] for each in http.get("/api/ps").json()["models"]} == {"first"}


def test_upstream_and_unload(http: httpx.Client) -> None:
    assert http.get("/upstream/second/model_info").json()["served_model_name"] == "second"
    for name in ("org/name", "org%2Fname", "gpt-4o", "first:latest"):
        assert http.get(f"/upstream/{name}/model_info").json()["served_model_name"] == "first", name
    for name in ("org", "org/name2", "firs", "first:ahoy"):
        assert http.get(f"/upstream/{name}/model_info").status_code == 404, name
    body = {"text": "The harbour", "sampling_params": {"max_new_tokens": 4}}
    assert http.post("/upstream/second/generate", json=body).status_code == 200
    assert states(http)["second"] == "awake"
    assert http.post("/api/models/unload/second").status_code == 200
    assert set(states(http).values()) == {"asleep"}
    text(http, "first")
    assert http.get("/unload", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    assert http.get("/unload").json() == {"msg": "ok"}
    assert set(states(http).values()) == {"asleep"}


def test_no_answer_is_cut_off(http: httpx.Client) -> None:
    """Streams of both models at once: each ends with all of its tokens."""
    alone = {name: text(http, name, 80) for name in MODELS}
    answers: list[tuple[str, str]] = []

    def stream(name: str) -> None:
        body = {"model": name, "prompt": "The harbour", "max_tokens": 80, "temperature": 0, "ignore_eos": True}
        with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
            events = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: {")]
        answers.append((name, "".join(yaml.safe_load(event)["choices"][0]["text"] for event in events)))

    asking = [threading.Thread(target=stream, args=(name,)) for name in (*MODELS, *MODELS, *MODELS)]
    for each in asking:
        each.start()
    for each in asking:
        each.join()
    assert sorted(answers) == sorted((name, alone[name]) for name in (*MODELS, *MODELS, *MODELS))


class Held(NamedTuple):
    """What all processes of a server hold."""

    memory: int
    processes: int
    threads: int
    files: int
    shared: int
    """Entries of /dev/shm that they have mapped or opened."""


def held_by(pid: int) -> Held:
    process = psutil.Process(pid)
    tree = [process, *process.children(recursive=True)]
    shared = len(mapped_files([each.pid for each in tree]))
    threads, files = sum(each.num_threads() for each in tree), sum(each.num_fds() for each in tree)
    return Held(sum(each.memory_info().rss for each in tree), len(tree), threads, files, shared)


def least(held: list[Held]) -> Held:
    """Of each kind, in the last swaps: what is there for a moment only is in some of them alone."""
    return Held(*map(min, *held[-5:]))


@pytest.mark.parametrize("swaps", [20, pytest.param(200, marks=pytest.mark.thorough)])
def test_swaps_leave_nothing_behind(swaps: int, tmp_path: Path) -> None:
    """And one model goes on when the other one's process has been killed."""
    server = started(tmp_path)
    try:
        with httpx.Client(base_url=server.url, timeout=300) as http:
            expected = text(http, "first")
            pid, held = server.process.pid, list[Held]()
            for swap in range(swaps):
                assert text(http, ("second", "first")[swap % 2]) == expected
                held.append(held_by(pid))
            half, end = least(held[: swaps // 2]), least(held[swaps // 2 :])
            print(f"in {swaps // 2} swaps {half}, in as many more {end}")
            assert end.memory - half.memory < 8 << 20
            assert end.processes <= half.processes and end.files <= half.files and end.shared <= half.shared
            assert end.threads - half.threads < swaps // 4, "pools start their threads when they need them"
            by_size = sorted(psutil.Process(pid).children(recursive=True), key=lambda each: each.memory_info().rss)
            by_size[-1].kill()  # the scheduler of one of them
            while server.health() == 200 and {ask(http, name).status_code for name in MODELS} == {200}:
                pass
            assert server.health() == 200
            assert sorted(ask(http, name).status_code for name in MODELS) == [200, 503]
            assert "failed" in states(http).values()
    finally:
        server.end()


def test_the_page(tmp_path: Path) -> None:
    """The file and the commands of the page, with the embedded model in the place of its models."""
    page = PAGE.read_text()
    file = page.partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "models.yaml").write_text(re.sub(r"model-path: [^,}]+", f"model-path: {DEFAULT_MODEL_PATH}", file))
    lines = page.partition("```sh\n")[2].partition("```")[0].splitlines()
    serve, *curls = (shlex.split(line.partition("   # GPU")[0]) for line in lines)
    assert serve[:4] == ["sglang", "serve", "--models", "models.yaml"]
    words = ("--models", str(tmp_path / "models.yaml"), "--max-total-tokens", "2048", "--context-length", "2048")
    server = LiveServer(*words, "--model-path", DEFAULT_MODEL_PATH).wait_up()
    try:
        for curl in curls:
            words_of = [word.replace("http://127.0.0.1:30000", server.url) for word in curl]
            done = subprocess.run([*words_of, "--fail", "--silent"], capture_output=True, text=True, check=True)
            assert json.loads(done.stdout)
        cards = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert [(card["id"], card["state"]) for card in cards] == [("qwen", "asleep"), ("coder", "asleep")]
    finally:
        server.end()


def check_adapters(http: httpx.Client) -> None:
    """Adapters are listed under the names by which requests have them."""
    model, adapter = http.get("/v1/models").json()["data"]
    assert (adapter["id"], adapter["parent"], adapter["root"]) == ("org/two:ahoy", "org/two", str(AHOY))
    for name in ("org/two:ahoy", "first:ahoy"):
        assert http.get(f"/v1/models/{name}").json() | {"state": "asleep"} == adapter
        assert http.get(f"/upstream/{name}/model_info").json()["served_model_name"] == "org/two"
        assert ask(http, name).status_code == 200
    for name in ("org/two", "first", "first:latest"):
        assert http.get(f"/v1/models/{name}").json()["id"] == model["id"] == "org/two"
    assert http.get("/v1/models/first:other").json()["code"] == "model_not_found"


def test_keys_are_those_of_the_route(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    flags = {**MODELS["first"]["flags"], "lora-paths": f"ahoy={AHOY}"}
    file.write_text(yaml.safe_dump({"models": {"org/two": {"flags": flags, "aliases": ["first"]}}}))
    keys = ("--api-key", "user", "--admin-api-key", "boss")
    server = LiveServer("--models", str(file), "--model-path", DEFAULT_MODEL_PATH, *keys).wait_up()
    paths = ("/unload", "/api/models/unload/first", "/upstream/first/flush_cache", "/upstream/first/abort_request/")
    try:
        with httpx.Client(base_url=server.url, timeout=300) as http:
            assert ask(http, "first").status_code == http.get("/upstream/first/v1/models").status_code == 401
            for path in paths:
                assert http.post(path, headers={"x-api-key": "user"}).status_code == 403, path
                assert http.post(path, headers={"x-api-key": "boss"}).status_code != 403, path
            http.headers["x-api-key"] = "user"
            check_adapters(http)
    finally:
        server.end()
