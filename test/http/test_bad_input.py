"""Requests that cannot be served: each gets its status and shape, and the server goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from live_server import LiveServer

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
DETOKENIZE = "/detokenize"
JSON = {"content-type": "application/json"}
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


ALLOWED = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}
NESTED = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE, "/tokenize", "/abort_request"])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"a": "\\ud800"}', NESTED, b'"text"'])
def test_broken_json(http: httpx.Client, path: str, body: bytes) -> None:
    refused(http.post(path, content=body, headers=JSON))


def test_nesting_is_refused_in_each_interfaces_form(http: httpx.Client) -> None:
    body = b'{"messages": ' + b"[" * 128 + b"]" * 128 + b"}"
    message = "Invalid request: the JSON is nested more than 128 levels deep; make it flatter"
    assert message in refused(http.post(CHAT, content=body, headers=JSON))
    assert message in refused(http.post(GENERATE, content=body, headers=JSON))
    anthropic, ollama = (http.post(path, content=body, headers=JSON) for path in ("/v1/messages", "/api/chat"))
    assert (anthropic.status_code, ollama.status_code) == (400, 400)
    assert anthropic.json()["error"]["message"] == message and ollama.json() == {"error": message}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE, "/tokenize", "/abort_request", "/pause_generation"])
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_other_content_types(http: httpx.Client, path: str, kind: str) -> None:
    body = json.dumps({"prompt": "x", "text": "x", "max_tokens": 1, "rid": "nobody"})
    assert "application/json" in refused(http.post(path, content=body, headers={"content-type": kind}), 415)


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain"])
def test_ollamas_bodies_are_json_whatever_their_type(http: httpx.Client, kind: str) -> None:
    """`curl -d` says that it sends a form."""
    body = json.dumps({"model": "tiny", "prompt": "x", "stream": False, "options": {"num_predict": 2}})
    answer = http.post("/api/generate", content=body, headers={"content-type": kind})
    assert answer.status_code == 200 and answer.json()["done"]
    form = http.post("/api/chat", content="model=tiny&stream=false", headers={"content-type": kind})
    assert form.status_code == 400


def test_no_page_of_the_api_loads_from_elsewhere(http: httpx.Client) -> None:
    assert http.get("/openapi.json").status_code == 200
    for path in ("/docs", "/redoc"):
        assert http.get(path).status_code == 404


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON", "application/hal+json"])
def test_json_content_types(http: httpx.Client, kind: str) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 1})
    assert http.post(COMPLETIONS, content=body, headers={"content-type": kind}).status_code == 200
    assert "Content-Type: application/json" in refused(http.post(COMPLETIONS, content=body), 415)
    no_body = http.post("/flush_cache", headers={"content-type": "application/x-www-form-urlencoded"})
    assert no_body.status_code == 200


def test_huge_body(http: httpx.Client) -> None:
    announced = http.post(COMPLETIONS, content=b'{"prompt": "' + b"x" * (65 << 20) + b'"}')
    assert "larger" in refused(announced, 413)

    def parts() -> Iterator[bytes]:
        yield b'{"text": "'
        for _ in range(66):
            yield b"x" * (1 << 20)

    assert "larger" in refused(http.post(GENERATE, content=parts(), headers=JSON), 413)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"temperature": -1}, "temperature must be"),
        ({"top_p": 0}, "top_p must be in (0, 1], got 0."),
        ({"top_p": 1.5}, "top_p must be in (0, 1]"),
        ({"top_k": 0}, "top_k must be"),
        ({"top_k": 1 << 64}, "top_k"),
        ({"top_k": 10**400}, "top_k"),
        ({"n": 10**400}, "n:"),
        ({"max_tokens": 10**400}, "max_tokens"),
        ({"temperature": 10**400}, "temperature"),
        ({"logit_bias": {"1": 10**400}}, "logit_bias"),
        ({"priority": 1 << 40}, "priority"),
        ({"min_p": 2}, "min_p must be in [0, 1]"),
        ({"frequency_penalty": 3}, "frequency_penalty must be in [-2, 2]"),
        ({"presence_penalty": -3}, "presence_penalty must be in [-2, 2]"),
        ({"repetition_penalty": 0}, "repetition_penalty must be in (0, 2]"),
        ({"max_tokens": -1}, "max_new_tokens"),
        ({"min_tokens": 50, "max_tokens": 5}, "min_new_tokens"),
        ({"stop": ["x"] * 33}, "stop"),
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
        ({"session_params": {"id": "s"}}, "session_params is not supported"),
        ({"return_hidden_states": True}, "return_hidden_states is not supported: /generate returns them"),
        ({"custom_logit_processor": "{}"}, "custom_logit_processor is not supported"),
        ({"guided_json": {"type": "object"}}, "use response_format"),
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
    refused(http.post(COMPLETIONS, content=f'{{"prompt": "x", "max_tokens": 1, "{field}": {number}}}', headers=JSON))
    refused(http.post(GENERATE, content=f'{{"text": "x", "sampling_params": {{"{field}": {number}}}}}', headers=JSON))


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "king", "content": "hi"}]}, "role"),
        ({"messages": [{"content": "hi"}]}, "role"),
        ({"messages": [{"role": "user", "content": 7}]}, "content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "data:,"}]}]}, "vision"),
        ({"messages": HELLO, "top_logprobs": 3}, "logprobs"),
        ({"messages": HELLO, "tool_choice": "required"}, "tools"),
        ({"messages": HELLO, "tools": [{"type": "function"}]}, "function"),
        ({"messages": HELLO, "continue_final_message": True}, "continue_final_message"),
        ({"messages": HELLO, "moderation": {"model": "m"}}, "content is not moderated"),
        ({"messages": HELLO, "documents": [{"text": "a"}]}, "documents is not supported"),
        ({"messages": HELLO, "prompt_cache_options": {"prewarm": True}}, "prewarm is not supported"),
        ({"messages": HELLO, "tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED}}, "'f', which is not"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]}, "send tool_calls"),
        ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "audio is not supported"),
        ({"messages": HELLO, "functions": [{"name": "f"}]}, "functions is not supported: use tools"),
        ({"messages": HELLO, "modalities": ["text", "audio"]}, "modalities is not supported"),
        ({"messages": [{"role": "user", "content": "hi", "tool_calls": "x"}]}, "messages[0].tool_calls"),
        ({"messages": HELLO * 16_385}, "messages"),
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
        ({"text": ["a", "b"], "lora_path": [None, "x"]}, "lora_path"),
        ({"text": "a", "session_params": {"id": "s"}}, "There is no session"),
        ({"text": "a", "audio_data": "x.wav"}, "audio_data"),
        ({"text": "a", "video_data": ["x.mp4"]}, "videos"),
        ({"text": "a", "require_reasoning": True}, "require_reasoning"),
        ({"text": "a", "sampling_params": {"top_k": 1 << 64}}, "top_k"),
        ({"text": "a", "sampling_params": {"top_k": 10**400}}, "top_k"),
        ({"text": "a", "sampling_params": {"n": 10**400}}, "n must be in [1, 128]"),
        ({"text": "a", "sampling_params": {"min_new_tokens": 10**400}}, "min_new_tokens"),
        ({"text": ["a"] * 4096, "sampling_params": {"n": 128}}, "4096 prompts with n=128"),
        ({"input_ids": [1, [2]]}, "input_ids"),
        ({"input_ids": [[1], 2]}, "input_ids"),
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
    refused(http.post("/pause_generation", json={"mode": "stop"}))
    refused(http.post("/start_profile", json={"num_steps": 5}))
    for seconds in ("-1", "nan", "soon", "1e9"):
        refused(http.post("/flush_cache", params={"timeout": seconds}))
    refused(http.post("/detokenize", json={"tokens": [-5]}))
    refused(http.post("/detokenize", json={"tokens": [1 << 62]}))


def test_any_model_name_is_accepted(http: httpx.Client) -> None:
    answer = http.post(COMPLETIONS, json={"model": "gpt-9", "prompt": "x", "max_tokens": 1})
    assert answer.status_code == 200 and answer.json()["model"] == "gpt-9"
    named = http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1})
    assert named.json()["model"] == "tiny"
    refused(http.post(COMPLETIONS, json={"model": "x" * 5000, "prompt": "x", "max_tokens": 1}))


def test_abort_of_an_unknown_request_is_harmless(http: httpx.Client) -> None:
    assert http.post("/abort_request", json={"rid": "nobody"}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"lora_path": ""},
        {"lora_path": None},
        {"lora_path": [None]},
        {"stop_token_ids": [-1, 1 << 40, 99_999_999]},
        {"session_params": {}, "return_hidden_states": False, "image_data": [], "data_parallel_rank": 0},
        {"name_of_nothing": {"a": [1]}, "another": True},
    ],
)
def test_fields_that_ask_for_nothing(http: httpx.Client, body: dict[str, Any]) -> None:
    sampling = {"stop_token_ids": body["stop_token_ids"]} if "stop_token_ids" in body else {}
    native = {"text": "x", "sampling_params": {"max_new_tokens": 1, **sampling}, **body}
    assert http.post(GENERATE, json=native).status_code == 200
    for path, prompt in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "x"})):
        answer = http.post(path, json={**prompt, "max_tokens": 1, **body})
        assert answer.status_code == 200, answer.text


BAD_ENTRIES = {
    "input_ids of objects": (GENERATE, b'{"input_ids": [%s]}', b"{}"),
    "text of numbers": (GENERATE, b'{"text": [%s]}', b"1"),
    "prompt of objects": (COMPLETIONS, b'{"prompt": [%s]}', b"{}"),
    "messages without a role": (CHAT, b'{"messages": [%s]}', b"{}"),
    "stop of numbers": (COMPLETIONS, b'{"prompt": "x", "stop": [%s]}', b"1"),
    "tokens of lists": (DETOKENIZE, b'{"tokens": [%s]}', b"[[]]"),
}


@pytest.mark.parametrize("name", BAD_ENTRIES)
def test_what_an_invalid_body_costs(http: httpx.Client, server: LiveServer, name: str) -> None:
    """A megabyte of wrong entries is refused for the first one: no gigabyte of error reports."""
    path, frame, entry = BAD_ENTRIES[name]
    memory = psutil.Process(server.process.pid).memory_info
    body = frame % b",".join([entry] * ((1 << 20) // (len(entry) + 1)))
    refused(http.post(path, content=body, headers=JSON))
    before = memory().rss
    for _ in range(3):
        answer = http.post(path, content=body, headers=JSON)
        assert len(answer.content) < 1000
    assert memory().rss - before < 64 << 20


@pytest.mark.parametrize("part", [b"[],", b'{"a":1},', b"1,"])
def test_more_values_than_anyone_needs(http: httpx.Client, part: bytes) -> None:
    body = b'{"text": "a", "sampling_params": {"stop": [' + part * ((20 << 20) // len(part)) + b"1]}}"
    assert "brackets" in refused(http.post(GENERATE, content=body, headers=JSON), 413)
