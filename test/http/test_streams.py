"""Streams that are silent for long, and streams that are aborted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from live_server import LiveServer, live_server

COMMENT = ": keep-alive"
MESSAGES = [{"role": "user", "content": "What is 2+2?"}]
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {"messages": MESSAGES, "temperature": 0},
    "/v1/completions": {"prompt": "2 + 2 =", "max_tokens": 8, "temperature": 0, "ignore_eos": True},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 8},
    "/v1/responses": {"input": "What is 2+2?", "max_output_tokens": 8},
}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_SSE_KEEP_ALIVE", "0.1")
        with live_server() as running:
            yield running


@pytest.mark.parametrize("path", BODIES)
def test_waiting_streams_are_kept_alive(server: LiveServer, path: str) -> None:
    """The engine pauses, so that nothing comes before the stream has shown that it lives."""
    httpx.post(f"{server.url}/pause_generation", json={"mode": "in_place"})
    lines = []
    with httpx.stream("POST", server.url + path, json={**BODIES[path], "stream": True}, timeout=300) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line == COMMENT and COMMENT not in lines:
                httpx.post(f"{server.url}/continue_generation")
            lines.append(line)
    data = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert COMMENT in lines and len(data) > 2 and not any("error" in event and event["error"] for event in data)


def test_clients_pass_over_comments(server: LiveServer) -> None:
    httpx.post(f"{server.url}/pause_generation", json={"mode": "in_place"})
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        messages: Any = MESSAGES
        stream = client.chat.completions.create(model="any", messages=messages, temperature=0, stream=True)
        httpx.post(f"{server.url}/continue_generation")
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "2 + 2 = 4"


LONG_TEXT = {"type": "string", "minLength": 1500}
LONG = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": LONG_TEXT}, "required": ["a"]}}
LONG_ANSWERS: dict[str, Any] = {
    "/v1/chat/completions": {"max_tokens": 3000, "ignore_eos": True},
    "/v1/completions": {"max_tokens": 3000, "ignore_eos": True},
    "/v1/messages": {"max_tokens": 3000, "output_config": {"format": LONG}},
    "/v1/responses": {"max_output_tokens": 3000, "text": {"format": {**LONG, "name": "long"}}},
}


@pytest.mark.parametrize("path", LONG_ANSWERS)
def test_an_answer_is_aborted_by_its_id(server: LiveServer, path: str) -> None:
    """That is what a client sees of a request to which it gave no id."""
    body = {**BODIES[path], **LONG_ANSWERS[path], "stream": True}
    lines = []
    with httpx.stream("POST", server.url + path, json=body, timeout=300) as response:
        for line in response.iter_lines():
            if line.startswith("data: {") and not lines:
                event = json.loads(line[6:])
                answer = event.get("message") or event.get("response") or event
                assert httpx.post(f"{server.url}/abort_request", json={"rid": answer["id"]}).status_code == 200
                lines.append(line)
            lines += [line] if "aborted" in line else []
    assert len(lines) > 1


def test_what_is_wrong_at_once_is_a_status(server: LiveServer) -> None:
    reply = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "top_p": 0, "stream": True})
    assert reply.status_code == 400


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_an_aborted_stream_ends_with_an_error(server: LiveServer, path: str) -> None:
    body = {**BODIES[path], "stream": True, "max_tokens": 3000, "ignore_eos": True}
    events = []
    with httpx.stream("POST", server.url + path, json=body, timeout=300) as response:
        for line in response.iter_lines():
            if not events:
                httpx.post(f"{server.url}/abort_request", json={"abort_all": True})
            if line.startswith("data: "):
                events.append(line[6:])
    assert events[-1] == "[DONE]" and "aborted" in json.loads(events[-2])["error"]["message"]
    assert not any(choice["finish_reason"] for event in events[:-2] for choice in json.loads(event)["choices"])


def test_the_client_sees_the_error(server: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        messages: Any = MESSAGES
        options: Any = {"extra_body": {"ignore_eos": True}, "max_tokens": 3000}
        with pytest.raises(openai.APIError, match="aborted"):
            for _ in client.chat.completions.create(model="any", messages=messages, stream=True, **options):
                httpx.post(f"{server.url}/abort_request", json={"abort_all": True})
