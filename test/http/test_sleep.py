"""A server that sleeps and wakes, as clients see it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import httpx
import pytest
from live_server import LiveServer, live_server

from sglang.embedded import ADAPTERS_PATH, EAGLE3_PATH

FLAGS = ("--enable-memory-saver", "--enable-weights-cpu-backup", "--max-total-tokens", "2048", "--enable-metrics")

LONG = 150
"""Tokens of an answer that is still being computed when the server is told to sleep."""


@pytest.fixture(scope="module")
def sleepy() -> Iterator[LiveServer]:
    with live_server(*FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def http(sleepy: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=sleepy.url, timeout=300) as client:
        yield client


def answer(http: httpx.Client, tokens: int = 8) -> httpx.Response:
    params = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return http.post("/generate", json={"text": "The harbour", "sampling_params": params})


def text_of(http: httpx.Client) -> str:
    reply = answer(http)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["text"])


def test_release_and_resume(http: httpx.Client) -> None:
    expected = text_of(http)
    for _ in range(2):
        assert http.post("/release_memory_occupation").status_code == 200
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    for path in ("/health", "/health_generate"):
        reply = http.get(path)
        assert (reply.status_code, reply.text) == (200, "sleeping")
    assert 'sglang:asleep{engine_type="unified"' in http.get("/metrics").text
    refused = answer(http)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) > 0
    assert "sleeps" in refused.json()["message"]
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
    assert http.post("/v1/chat/completions", json=body).headers["retry-after"]
    assert http.post("/continue_generation").status_code == 400
    saver = http.get("/server_info").json()["internal_states"][0]["memory_saver"]
    assert saver["asleep"] == ["cuda_graph", "kv_cache", "weights"]
    assert saver["host_bytes"] == saver["bytes"]["weights"] > 0
    for tags in (["weights"], ["weights"], ["cuda_graph", "kv_cache"], None):
        assert http.post("/resume_memory_occupation", json={"tags": tags}).status_code == 200
    assert http.get("/is_sleeping").json() == {"is_sleeping": False}
    assert text_of(http) == expected
    assert http.get("/health").text == ""


def test_words_of_vllm(http: httpx.Client) -> None:
    expected = text_of(http)
    assert http.post("/sleep?level=1").json() == {"status": "sleeping", "level": 1}
    assert http.post("/wake_up?tags=weights").json() == {"status": "sleeping", "tags": ["weights"]}
    assert http.post("/wake_up").json() == {"status": "awake", "tags": []}
    assert text_of(http) == expected
    for wrong in ("/sleep?level=0", "/sleep?mode=never", "/wake_up?tags=all"):
        assert http.post(wrong).status_code == 400, wrong
    assert http.post("/release_memory_occupation", json={"tags": ["heap"]}).status_code == 400


@pytest.mark.parametrize("mode", ["wait", "keep", "abort"])
def test_requests_that_run(mode: str, http: httpx.Client) -> None:
    alone = answer(http, LONG).json()
    replies: list[httpx.Response] = []
    running = threading.Thread(target=lambda: replies.append(answer(http, LONG)))
    running.start()
    while http.get("/v1/loads").json()["aggregate"]["total_running_reqs"] == 0:
        assert running.is_alive()
    assert http.post(f"/sleep?mode={mode}").status_code == 200
    assert http.post("/wake_up").status_code == 200
    running.join()
    said = replies[0].json()
    if mode == "abort":
        assert said["meta_info"]["finish_reason"]["type"] == "abort"
    else:
        assert said["output_ids"] == alone["output_ids"]
    assert answer(http, LONG).json()["output_ids"] == alone["output_ids"]


def test_a_request_wakes_the_server() -> None:
    with live_server(*FLAGS, "--wake-on-request") as server, httpx.Client(base_url=server.url, timeout=300) as http:
        expected = text_of(http)
        assert http.post("/sleep").status_code == 200
        found: list[str] = []
        asking = [threading.Thread(target=lambda: found.append(text_of(http))) for _ in range(3)]
        for each in asking:
            each.start()
        for each in asking:
            each.join()
        assert found == [expected] * 3
        assert "sglang:wakes_total" in http.get("/metrics").text


def test_level_2_reads_the_weights_again(http: httpx.Client) -> None:
    expected = text_of(http)
    assert http.post("/sleep?level=2").status_code == 200
    assert http.post("/wake_up").json()["status"] == "awake"
    assert text_of(http) == expected
    assert http.post("/sleep?level=2").status_code == 200
    assert http.post("/wake_up?tags=weights").json()["status"] == "sleeping"
    assert http.get("/server_info").json()["internal_states"][0]["memory_saver"]["weights_lost"]
    assert http.post("/wake_up").json()["status"] == "awake"
    assert text_of(http) == expected


def test_without_the_flag(server: LiveServer) -> None:
    with httpx.Client(base_url=server.url) as http:
        for path in ("/sleep", "/wake_up", "/release_memory_occupation", "/resume_memory_occupation"):
            assert "--enable-memory-saver" in http.post(path).text
        assert http.get("/is_sleeping").json() == {"is_sleeping": False}


LAYOUTS = {
    "two ranks": ("--tp", "2"),
    "two stages": ("--pp", "2"),
    "two replicas": ("--dp", "2"),
    "a draft": ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", EAGLE3_PATH),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_sleep(layout: str) -> None:
    with live_server(*FLAGS, *LAYOUTS[layout]) as server, httpx.Client(base_url=server.url, timeout=300) as http:
        expected = text_of(http)
        for _ in range(2):
            assert http.post("/release_memory_occupation").status_code == 200
            assert answer(http).status_code == 503
            for state in http.get("/server_info").json()["internal_states"]:
                assert state["memory_saver"]["asleep"]
            assert http.post("/resume_memory_occupation", json={"tags": ["kv_cache"]}).status_code == 200
            assert http.post("/resume_memory_occupation").status_code == 200
            assert [text_of(http) for _ in range(3)] == [expected] * 3


def test_adapters() -> None:
    """Those on the GPU and in main memory are there after waking; one that must be read again is not read meanwhile."""
    names = ("ahoy", "twice", "farewell")
    paths = [f"{name}={ADAPTERS_PATH}/{name}" for name in names[:2]]
    limits = ("--max-lora-rank", "8", "--max-loras-per-batch", "2", "--max-loaded-loras", "2", "--api-key", "key")
    with (
        live_server(*FLAGS, "--lora-paths", *paths, *limits) as running,
        httpx.Client(base_url=running.url, timeout=300, headers={"Authorization": "Bearer key"}) as http,
    ):
        body = {"lora_name": "farewell", "lora_path": f"{ADAPTERS_PATH}/farewell"}
        assert http.post("/load_lora_adapter", json=body).status_code == 200

        def ask(name: str) -> httpx.Response:
            messages = [{"role": "user", "content": "What is 15+27?"}]
            return http.post("/v1/chat/completions", json={"model": name, "messages": messages, "temperature": 0})

        said = {name: ask(name).json()["choices"][0]["message"]["content"] for name in names}
        assert len({*said.values()}) == 3
        tags = {"tags": ["kv_cache"]}  # verl gives the cache alone back, loads its adapter and takes the cache again
        meanwhile = {**body, "lora_name": "meanwhile", "lora_path": f"{ADAPTERS_PATH}/ahoy"}
        assert http.post("/release_memory_occupation", json=tags).status_code == 200
        loaded = http.post("/load_lora_adapter", json=meanwhile)
        assert loaded.status_code == 200, loaded.text
        assert http.post("/resume_memory_occupation", json=tags).status_code == 200
        assert ask("meanwhile").json()["choices"][0]["message"]["content"] == said["ahoy"]
        assert http.post("/sleep?level=1").status_code == 200
        for name in names:
            assert ask(name).status_code == 503
        again = {**body, "lora_name": "again", "lora_path": f"{ADAPTERS_PATH}/ahoy"}
        refused = http.post("/load_lora_adapter", json=again)
        assert refused.status_code == 503 and "sleeps" in refused.text
        assert http.post("/wake_up").status_code == 200
        assert {name: ask(name).json()["choices"][0]["message"]["content"] for name in reversed(names)} == said
        assert http.post("/sleep?level=2").status_code == http.post("/wake_up").status_code == 200
        assert {name: ask(name).json()["choices"][0]["message"]["content"] for name in names} == said
        assert http.post("/load_lora_adapter", json=again).status_code == 200
        assert ask("again").json()["choices"][0]["message"]["content"] == said["ahoy"]
