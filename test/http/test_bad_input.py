"""Requests that cannot be served: each gets its status and shape, and the server goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def server_lives_on(http: httpx.Client) -> Iterator[None]:
    yield
    assert http.get("/health").status_code == 200
    answer = http.post(COMPLETIONS, json={"prompt": "still there?", "max_tokens": 1})
    assert answer.status_code == 200, answer.text


def refused(response: httpx.Response, status: int = 400) -> str:
    """The message of a refusal, after checking its shape."""
    assert response.status_code == status, response.text[:500]
    body = response.json()
    if response.request.url.path.startswith("/v1/"):
        assert body["object"] == "error" and {"message", "type", "param", "code"} <= body.keys()
        message: str = body["message"]
    else:
        assert body.keys() == {"error"} and body["error"].keys() == {"message"}
        message = body["error"]["message"]
    assert message and "Traceback" not in message
    return message


NESTED = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE, "/tokenize", "/abort_request"])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"a": "\\ud800"}', NESTED, b'"text"'])
def test_broken_json(http: httpx.Client, path: str, body: bytes) -> None:
    refused(http.post(path, content=body, headers={"content-type": "application/json"}))


def test_content_type_does_not_matter(http: httpx.Client) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 1})
    assert http.post(COMPLETIONS, content=body, headers={"content-type": "text/plain"}).status_code == 200


def test_huge_body(http: httpx.Client) -> None:
    announced = http.post(COMPLETIONS, content=b'{"prompt": "' + b"x" * (65 << 20) + b'"}')
    assert "larger" in refused(announced, 413)

    def parts() -> Iterator[bytes]:
        yield b'{"text": "'
        for _ in range(66):
            yield b"x" * (1 << 20)

    assert "larger" in refused(http.post(GENERATE, content=parts()), 413)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"temperature": -1}, "temperature must be"),
        ({"top_p": 0}, "top_p must be in (0, 1], got 0."),
        ({"top_p": 1.5}, "top_p must be in (0, 1]"),
        ({"top_k": 0}, "top_k must be"),
        ({"min_p": 2}, "min_p must be in [0, 1]"),
        ({"frequency_penalty": 3}, "frequency_penalty must be in [-2, 2]"),
        ({"presence_penalty": -3}, "presence_penalty must be in [-2, 2]"),
        ({"repetition_penalty": 0}, "repetition_penalty must be in (0, 2]"),
        ({"max_tokens": -1}, "max_new_tokens"),
        ({"min_tokens": 50, "max_tokens": 5}, "min_new_tokens"),
        ({"stop": ["x"] * 33}, "stop"),
        ({"stop_token_ids": [1 << 40]}, "stop_token_ids"),
        ({"logit_bias": {"no number": 1}}, "logit_bias"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"n": 0}, "n:"),
        ({"seed": 1 << 80}, "seed"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "one of"),
        ({"regex": "("}, ""),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no such type"}}}}, ""),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"temperature": "warm"}, "temperature"),
        ({"lora_path": "adapter"}, "lora_path"),
        ({"stream_options": {"include_usage": "?"}}, "stream_options"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_invalid_values(http: httpx.Client, fields: dict[str, Any], part: str, stream: bool) -> None:
    """Also in a stream, they are found before the first event."""
    assert part in refused(http.post(CHAT, json={"messages": HELLO, "stream": stream, **fields}))
    assert part in refused(http.post(COMPLETIONS, json={"prompt": "hi", "stream": stream, **fields}))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty"])
def test_numbers_that_are_none(http: httpx.Client, field: str, number: str) -> None:
    refused(http.post(COMPLETIONS, content=f'{{"prompt": "x", "max_tokens": 1, "{field}": {number}}}'))
    refused(http.post(GENERATE, content=f'{{"text": "x", "sampling_params": {{"{field}": {number}}}}}'))


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "king", "content": "hi"}]}, "role"),
        ({"messages": [{"content": "hi"}]}, "role"),
        ({"messages": [{"role": "user", "content": 7}]}, "content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "vision"),
        ({"messages": HELLO, "top_logprobs": 3}, "logprobs"),
        ({"messages": HELLO, "tool_choice": "required"}, "tools"),
        ({"messages": HELLO, "tools": [{"type": "function"}]}, "function"),
        ({"messages": HELLO, "continue_final_message": True}, "continue_final_message"),
        ({"messages": HELLO, "max_tokens": 100_000}, "context"),
    ],
)
def test_invalid_chats(http: httpx.Client, body: dict[str, Any], part: str) -> None:
    assert part in refused(http.post(CHAT, json=body))


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "two"]}, "prompt"),
        ({"prompt": [-1]}, "input_ids"),
        ({"prompt": [10_000_000]}, "input_ids"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "logprobs": -1}, "logprobs"),
        ({"prompt": "many words " * 5000}, "context"),
        ({"prompt": "x" * (3 << 20)}, "context"),
        ({"prompt": "a", "max_tokens": 5000}, "context"),
    ],
)
def test_invalid_completions(http: httpx.Client, body: dict[str, Any], part: str) -> None:
    assert part in refused(http.post(COMPLETIONS, json=body))


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "not both"),
        ({"text": 5}, "text"),
        ({"text": []}, "batch"),
        ({"input_ids": []}, ""),
        ({"input_ids": [1, 2.5]}, "input_ids"),
        ({"text": "a", "sampling_params": {"temprature": 1}}, "temprature"),
        ({"text": "a", "sampling_params": {"temperature": "hot"}}, "temperature"),
        ({"text": "a", "sampling_params": 5}, "sampling_params"),
        ({"text": "a", "sampling_params": [{}, {}]}, "sampling_params"),
        ({"text": "a", "sampling_params": {"sampling_seed": 1 << 90}}, "sampling_seed"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 1 << 90}}, "max_new_tokens"),
        ({"text": ["a", "b"], "rid": ["same", "same"]}, "rid"),
        ({"text": "a", "rid": 5}, "rid"),
        ({"text": "a", "image_data": "x.png"}, "vision"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": 99}, "logprob_start_len"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num"),
        ({"text": "a", "return_logprob": True, "token_ids_logprob": [1 << 40]}, "token_ids_logprob"),
        ({"text": "a", "priority": 1 << 90}, "priority"),
    ],
)
def test_invalid_generate_calls(http: httpx.Client, body: dict[str, Any], part: str) -> None:
    assert part in refused(http.post(GENERATE, json=body))
    assert part in refused(http.post(GENERATE, json={**body, "stream": True}))


def test_routes_and_methods(http: httpx.Client) -> None:
    assert "/v1/nothing" in refused(http.get("/v1/nothing"), 404)
    assert "/nothing" in refused(http.get("/nothing"), 404)
    refused(http.get(CHAT), 405)
    refused(http.post("/abort_request", json={}))
    refused(http.post("/detokenize", json={"tokens": [-5]}))
    refused(http.post("/detokenize", json={"tokens": [1 << 62]}))


def test_any_model_name_is_accepted(http: httpx.Client) -> None:
    answer = http.post(COMPLETIONS, json={"model": "gpt-9", "prompt": "x", "max_tokens": 1})
    assert answer.status_code == 200 and answer.json()["model"] == "tiny"


def test_abort_of_an_unknown_request_is_harmless(http: httpx.Client) -> None:
    assert http.post("/abort_request", json={"rid": "nobody"}).status_code == 200
