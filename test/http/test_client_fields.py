"""Fields that current clients send to any server or read in any answer, over HTTP."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import openai
import pytest
from live_server import LiveServer

CONTEXT = 4096
FAR = 128_000
"""The output length that LiteLLM asks for where a client names none."""
HELLO = [{"role": "user", "content": "What is 15+27?"}]
APPLES = "Tom has 12 apples. He buys 30 more and then gives 5 away. How many does he have now?"


@pytest.fixture(scope="module")
def parsing(parsing_server: LiveServer) -> Any:
    with httpx.Client(base_url=parsing_server.url, timeout=60) as client:
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


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_fills_the_context(parsing_server: LiveServer, stream: bool) -> None:
    """The prompt leaves a few tokens; the schema makes the answer longer."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "minLength": 400}}, "required": ["a"]}
    with anthropic.Anthropic(base_url=parsing_server.url, api_key="none", max_retries=0, timeout=60) as client:
        form = {"format": {"type": "json_schema", "schema": schema}}
        options: Any = {"model": "tiny", "thinking": {"type": "disabled"}, "output_config": form}
        count = client.messages.count_tokens(**options, messages=HELLO).input_tokens
        messages: Any = [{"role": "user", "content": "a" + " a" * (CONTEXT - count - 100)}]
        options["messages"] = messages
        room = CONTEXT - client.messages.count_tokens(**options).input_tokens
        assert 10 < room < 300
        for limit, reason in ((FAR, "model_context_window_exceeded"), (8, "max_tokens")):
            if stream:
                with client.messages.stream(**options, max_tokens=limit) as events:
                    answer = events.get_final_message()
            else:
                answer = client.messages.create(**options, max_tokens=limit)
            assert (answer.stop_reason, answer.usage.output_tokens) == (reason, min(room, limit))
    chat = {"messages": messages, "max_tokens": FAR, "ignore_eos": True}
    reply = httpx.post(f"{parsing_server.url}/v1/chat/completions", json=chat, timeout=60).json()
    assert finishes(reply) == ["length"]


def test_tokens_of_thoughts_are_counted_where_clients_look(parsing_server: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{parsing_server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
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
