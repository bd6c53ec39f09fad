"""Fields that current clients send to any server or read in any answer, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from live_server import LiveServer, live_server

CONTEXT, SHORT = 4096, 512
FAR = 128_000
"""The output length that LiteLLM asks for where a client names none."""
HELLO = [{"role": "user", "content": "What is 15+27?"}]
APPLES = "Tom has 12 apples. He buys 30 more and then gives 5 away. How many does he have now?"


@pytest.fixture(scope="module")
def parsing(parsing_server: LiveServer) -> Any:
    with httpx.Client(base_url=parsing_server.url, timeout=300) as client:
        yield client


LONG_FORMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": FAR},
    "/v1/completions": {"prompt": "What is 15+27?", "max_tokens": FAR, "stop": [" "]},
    "/v1/responses": {"input": "What is 15+27?", "max_output_tokens": FAR},
    "/v1/messages": {"messages": HELLO, "max_tokens": FAR},
    "/api/chat": {"messages": HELLO, "stream": False, "options": {"num_predict": FAR}},
    "/api/generate": {"prompt": "a", "raw": True, "stream": False, "options": {"num_predict": FAR, "stop": [" "]}},
}


@pytest.mark.parametrize("path", LONG_FORMS)
def test_more_output_than_the_context_has(http: httpx.Client, path: str) -> None:
    """The answer ends by itself, and says so."""
    answer = http.post(path, json={"temperature": 0, **LONG_FORMS[path]})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    ended = {"stop", "completed", "end_turn"}
    assert {body.get("status"), body.get("stop_reason"), body.get("done_reason"), *finishes(body)} & ended


def finishes(body: dict[str, Any]) -> list[str]:
    return [choice["finish_reason"] for choice in body.get("choices", ())]


@pytest.fixture(scope="module")
def short_context() -> Iterator[LiveServer]:
    """Filling the whole context takes a processor a quarter of a minute."""
    parsers = ("--tool-call-parser", "auto", "--reasoning-parser", "auto")
    with live_server(*parsers, "--context-length", str(SHORT), "--served-model-name", "tiny") as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_fills_the_context(short_context: LiveServer, stream: bool) -> None:
    """The prompt leaves a few tokens; the schema makes the answer longer."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "minLength": 400}}, "required": ["a"]}
    with anthropic.Anthropic(base_url=short_context.url, api_key="none", max_retries=0, timeout=300) as client:
        form = {"format": {"type": "json_schema", "schema": schema}}
        options: Any = {"model": "tiny", "thinking": {"type": "disabled"}, "output_config": form}
        count = client.messages.count_tokens(**options, messages=HELLO).input_tokens
        messages: Any = [{"role": "user", "content": "a" + " a" * (SHORT - count - 100)}]
        options["messages"] = messages
        room = SHORT - client.messages.count_tokens(**options).input_tokens
        assert 10 < room < 300
        for limit, reason in ((FAR, "model_context_window_exceeded"), (8, "max_tokens")):
            if stream:
                with client.messages.stream(**options, max_tokens=limit) as events:
                    answer = events.get_final_message()
            else:
                answer = client.messages.create(**options, max_tokens=limit)
            assert (answer.stop_reason, answer.usage.output_tokens) == (reason, min(room, limit))
    chat = {"messages": messages, "max_tokens": FAR, "ignore_eos": True}
    reply = httpx.post(f"{short_context.url}/v1/chat/completions", json=chat, timeout=300).json()
    assert finishes(reply) == ["length"]


def test_tokens_of_thoughts_are_counted_where_clients_look(parsing_server: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{parsing_server.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        options: Any = {"model": "tiny", "messages": [{"role": "user", "content": APPLES}], "temperature": 0}
        usages = [client.chat.completions.create(**options).usage]
        chunks = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
        usages += [chunk.usage for chunk in chunks if chunk.usage]
        assert len(usages) == 2
        for usage in usages:
            assert usage is not None and usage.completion_tokens_details is not None
            thoughts = usage.completion_tokens_details.reasoning_tokens
            assert thoughts == usage.model_extra["reasoning_tokens"] and 0 < thoughts < usage.completion_tokens  # type: ignore[operator,index]
        quiet = client.chat.completions.create(**options, extra_body={"reasoning": {"effort": "none"}})
        assert quiet.usage.completion_tokens_details.reasoning_tokens == 0  # type: ignore[union-attr]
        budget = {"thinking": {"type": "enabled", "budget_tokens": 4}}
        short = client.chat.completions.create(**options, extra_body=budget)
        assert short.usage.completion_tokens_details.reasoning_tokens < thoughts  # type: ignore[union-attr]


@pytest.mark.parametrize("fields", [{"include_reasoning": False}, {"reasoning": {"exclude": True}}])
def test_an_answer_without_its_thoughts(parsing: httpx.Client, fields: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": APPLES}], "temperature": 0}
    whole = parsing.post("/v1/chat/completions", json=body).json()
    bare = parsing.post("/v1/chat/completions", json={**body, **fields}).json()
    messages = [answer["choices"][0]["message"] for answer in (whole, bare)]
    assert messages[0]["reasoning_content"] and messages[1] == {**messages[0], "reasoning_content": None}
    assert bare["usage"]["reasoning_tokens"] == whole["usage"]["reasoning_tokens"] > 0
    stream = parsing.post("/v1/chat/completions", json={**body, **fields, "stream": True}).text
    chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta["content"] or "" for delta in deltas) == messages[0]["content"]
    assert all(delta["reasoning_content"] is None for delta in deltas)


TOOL = {"type": "function", "function": {"name": "add_numbers", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["alone", "with tools"])
def test_the_tokens_of_a_conversation(parsing: httpx.Client, tools: list[dict[str, Any]]) -> None:
    """They are those of the answer's prompt, and its text."""
    body = {"model": "tiny", "messages": HELLO, "tools": tools}
    found = parsing.post("/tokenize", json={**body, "return_token_strs": True}).json()
    usage = parsing.post("/v1/chat/completions", json={**body, "max_tokens": 1}).json()["usage"]
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) == usage["prompt_tokens"]
    shown = parsing.post("/detokenize", json={"tokens": found["tokens"], "skip_special_tokens": False}).json()["text"]
    assert "What is 15+27?" in shown and ("add_numbers" in shown) == bool(tools)
    whole = parsing.post("/v1/tokenize", json={**body, "add_generation_prompt": False}).json()["tokens"]
    assert whole == found["tokens"][: len(whole)] and len(whole) < found["count"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, "either prompt or messages"),
        ({"prompt": "a", "messages": HELLO}, "either prompt or messages"),
        ({"messages": [{"role": "king"}]}, "role"),
        ({"messages": HELLO, "chat_template": "x"}, "chat_template"),
        ({"messages": [{"role": "user", "content": "a" * (3 << 20)}]}, "characters"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "data:,"}]}]}, "images"),
    ],
)
def test_conversations_that_have_no_tokens(http: httpx.Client, body: dict[str, Any], reason: str) -> None:
    answer = http.post("/tokenize", json=body)
    assert answer.status_code == 400 and reason in answer.json()["error"]["message"]


def test_models_as_anthropics_clients_read_them(server: LiveServer) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        page = client.models.list(limit=1)
        (model,) = page  # and no other page
        assert (page.has_more, page.first_id, page.last_id) == (False, "tiny", "tiny")
        assert client.models.retrieve("tiny") == model
    assert (model.type, model.id, model.display_name, model.lifecycle) == ("model", "tiny", "tiny", "active")
    assert (model.max_input_tokens, model.max_tokens) == (CONTEXT, CONTEXT) and model.created_at.year > 2000


def test_ids_of_requests(server: LiveServer, http: httpx.Client) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        answer = client.messages.create(model="tiny", max_tokens=2, messages=HELLO)  # type: ignore[arg-type]
        assert answer._request_id == answer.id.replace("msg_", "req_")
        with pytest.raises(anthropic.BadRequestError) as refused:
            client.messages.create(model="tiny", max_tokens=0, messages=HELLO)  # type: ignore[arg-type]
        assert (refused.value.request_id or "").startswith("req_")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        chat = client.chat.completions.create(model="tiny", max_tokens=2, messages=HELLO)  # type: ignore[arg-type]
        assert chat._request_id == chat.id.replace("chatcmpl-", "req_")
        with client.responses.with_streaming_response.create(model="tiny", input="Hi", max_output_tokens=2) as stream:
            assert stream.request_id == stream.parse().id.replace("resp_", "req_")
    given = http.get("/nowhere", headers={"x-request-id": "my-1"})
    assert given.status_code == 404
    assert [given.headers[name] for name in ("request-id", "x-request-id")] == ["my-1", "my-1"]
    for odd in ("a b", "x" * 129, ""):
        assert http.get("/health", headers={"x-request-id": odd}).headers["x-request-id"].startswith("req_")


def test_an_answer_is_aborted_by_the_id_in_its_headers(http: httpx.Client) -> None:
    body = {"messages": HELLO, "stream": True, "ignore_eos": True, "max_tokens": 3000}
    with http.stream("POST", "/v1/chat/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert http.post("/abort_request", json={"rid": stream.headers["request-id"]}).status_code == 200
        assert any("aborted" in line for line in lines)


HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,context-management-2025-06-27,unknown-2031-01-01",
    "anthropic-dangerous-direct-browser-access": "true",
    "anthropic-user-profile-id": "u",
    "anthropic-workspace-id": "w",
    "openai-beta": "responses=experimental",
    "openai-organization": "o",
    "openai-project": "p",
    "x-app": "cli",
    "x-stainless-retry-count": "0",
    "session_id": "s",
    "conversation_id": "c",
    "originator": "codex_cli_rs",
    "http-referer": "https://host",
    "x-title": "t",
}


@pytest.mark.parametrize(
    "path", ["/v1/messages?beta=true", "/v1/messages/count_tokens?beta=true", "/v1/chat/completions", "/v1/responses"]
)
def test_headers_of_clients_ask_for_nothing(http: httpx.Client, path: str) -> None:
    body = {"model": "any", "messages": HELLO, "input": "Hi", "max_tokens": 2, "max_output_tokens": 16}
    answer = http.post(path, json=body, headers=HEADERS)
    assert answer.status_code == 200, answer.text
