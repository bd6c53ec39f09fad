"""Streaming sessions: each request goes on from the last one that ended, whatever `rid` it names."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from live_server import LiveServer, live_server

GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
LONG = {**GREEDY, "max_new_tokens": 3000}
WIZARD, DETAIL, NEXT = "Tell me a very long story about a wizard.", " Continue in great detail.", " What happens next?"


@pytest.fixture(scope="module")
def streaming() -> Iterator[httpx.Client]:
    with (
        live_server("--enable-streaming-session", "--page-size", "1") as running,
        httpx.Client(base_url=running.url, timeout=300) as client,
    ):
        yield client


@pytest.fixture
def session(streaming: httpx.Client) -> Iterator[str]:
    streaming.post("/flush_cache")
    session_id = streaming.post("/open_session", json={"capacity_of_str_len": 50_000, "streaming": True}).json()
    yield session_id
    assert streaming.post("/close_session", json={"session_id": session_id}).status_code == 200


def send(client: httpx.Client, session: str, text: str, params: dict[str, Any] = GREEDY, **options: Any) -> Any:
    body = {"text": text, "sampling_params": params, "session_params": {"id": session, "rid": None, **options}}
    return client.post("/generate", json=body)


def append(client: httpx.Client, session: str, text: str, **options: Any) -> dict[str, Any]:
    reply = send(client, session, text, **options)
    assert reply.status_code == 200, reply.text
    result: dict[str, Any] = reply.json()
    return result


def num_tokens(result: dict[str, Any]) -> int:
    info = result["meta_info"]
    return int(info["prompt_tokens"] + info["completion_tokens"])


def ids(client: httpx.Client, text: str) -> list[int]:
    tokens: list[int] = client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    return tokens


def test_each_request_goes_on_from_the_last_one(streaming: httpx.Client, session: str) -> None:
    """The KV cache has all that was computed: every token of the request before but the last one it sampled."""
    said: list[int] = []
    for text in (WIZARD, DETAIL, NEXT):
        result = append(streaming, session, text)
        info = result["meta_info"]
        assert info["cached_tokens"] == (len(said) - 1 if said else 0)
        prompt = said + ids(streaming, text)
        assert info["prompt_tokens"] == len(prompt)
        whole = streaming.post("/generate", json={"input_ids": prompt, "sampling_params": GREEDY}).json()
        assert result["output_ids"] == whole["output_ids"]
        said = prompt + result["output_ids"]


def abort_mid_way(streaming: httpx.Client, session: str, text: str) -> None:
    """Sends a long request and aborts it once it runs."""
    replies: list[httpx.Response] = []
    body = {"text": text, "rid": "long", "sampling_params": LONG, "session_params": {"id": session, "rid": None}}
    thread = threading.Thread(target=lambda: replies.append(streaming.post("/generate", json=body)))
    thread.start()
    while thread.is_alive():
        state = streaming.get("/server_info").json()["internal_states"][0]
        if state["num_generated_tokens"] and state["num_unfinished_reqs"]:
            streaming.post("/abort_request", json={"abort_all": True})
        time.sleep(0.01)
    thread.join()
    assert replies[0].json()["meta_info"]["finish_reason"]["type"] == "abort", replies[0].text


def test_an_aborted_request_leaves_the_session_as_it_was(streaming: httpx.Client, session: str) -> None:
    abort_mid_way(streaming, session, WIZARD)
    first = append(streaming, session, WIZARD)
    assert first["meta_info"]["prompt_tokens"] == len(ids(streaming, WIZARD)), "nothing of the aborted one is there"
    abort_mid_way(streaming, session, DETAIL)
    third = append(streaming, session, NEXT)
    assert third["meta_info"]["prompt_tokens"] == num_tokens(first) + len(ids(streaming, NEXT))


def test_a_client_that_leaves_leaves_the_session_as_it_was(streaming: httpx.Client, session: str) -> None:
    first = append(streaming, session, WIZARD)
    body = {"text": DETAIL, "stream": True, "sampling_params": LONG, "session_params": {"id": session}}
    with streaming.stream("POST", "/generate", json=body) as response:
        next(response.iter_lines())
    reply = send(streaming, session, NEXT)
    while reply.status_code == 400 and "has not ended" in reply.text:  # until the server has seen it
        reply = send(streaming, session, NEXT)
    assert reply.json()["meta_info"]["prompt_tokens"] == num_tokens(first) + len(ids(streaming, NEXT))


@pytest.mark.parametrize("options", [{"offset": 1}, {"replace": True}, {"drop_previous_output": True}])
def test_it_only_appends(streaming: httpx.Client, session: str, options: dict[str, Any]) -> None:
    first = append(streaming, session, WIZARD)
    refused = send(streaming, session, DETAIL, **options)
    assert refused.status_code == 400 and next(iter(options)) in refused.text
    third = append(streaming, session, NEXT)
    assert third["meta_info"]["prompt_tokens"] == num_tokens(first) + len(ids(streaming, NEXT))


def test_one_request_at_a_time(streaming: httpx.Client, session: str) -> None:
    append(streaming, session, WIZARD)
    body = {"text": DETAIL, "stream": True, "sampling_params": LONG, "session_params": {"id": session}}
    with streaming.stream("POST", "/generate", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        second = send(streaming, session, NEXT)
    assert second.status_code == 400 and "has not ended" in second.text


def test_log_probabilities_and_a_name_that_is_not_there(streaming: httpx.Client, session: str) -> None:
    """`rid` names nothing here; what other fields ask for is answered as ever."""
    append(streaming, session, WIZARD)
    body = {"text": DETAIL, "sampling_params": GREEDY, "return_logprob": True, "logprob_start_len": 0}
    reply = streaming.post("/generate", json={**body, "session_params": {"id": session, "rid": "no such request"}})
    info = reply.json()["meta_info"]
    assert len(info["input_token_logprobs"]) == info["prompt_tokens"]
    assert len(info["output_token_logprobs"]) == GREEDY["max_new_tokens"]


def test_an_idle_session_ends(streaming: httpx.Client) -> None:
    opened = {"capacity_of_str_len": 1000, "streaming": True, "timeout": 0.01}
    session = streaming.post("/open_session", json=opened).json()
    time.sleep(0.02)
    reply = send(streaming, session, NEXT)
    assert reply.status_code == 400 and "no session" in reply.text


@pytest.mark.parametrize("timeout", [-1, 0, "soon", 1e400])
def test_a_timeout_is_a_number_of_seconds(streaming: httpx.Client, timeout: Any) -> None:
    body = f'{{"capacity_of_str_len": 10, "timeout": {"1e400" if timeout == 1e400 else repr(timeout)}}}'
    reply = streaming.post("/open_session", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400


def test_without_the_flag(server: LiveServer) -> None:
    body = {"capacity_of_str_len": 1000, "streaming": True}
    reply = httpx.post(f"{server.url}/open_session", json=body)
    assert reply.status_code == 400 and "relaunch with --enable-streaming-session" in reply.text
