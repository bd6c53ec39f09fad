"""litellm, as a library: the forms of OpenAI and Anthropic through its own translation."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest
from pydantic import BaseModel

from .conftest import MODEL, PERSON

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1800)]

ADD = [{"role": "user", "content": "Use the tool to add 12 and 30."}]
APPLES = "Tom has 12 apples. He buys 30 more and then gives 5 away. How many does he have now?"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add_numbers",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module")
def litellm() -> Any:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would be asked for over the network
    import litellm

    litellm.telemetry = False
    return litellm


@pytest.fixture(scope="module")
def options(base_url: str) -> dict[str, Any]:
    return {
        "model": f"openai/{MODEL}",
        "api_base": base_url,
        "api_key": "none",
        "temperature": 0,
        "max_tokens": 200,
        "num_retries": 0,
        "timeout": 60,
    }


def test_completion(litellm: Any, options: dict[str, Any]) -> None:
    answer = litellm.completion(messages=[{"role": "user", "content": "What is 15+27?"}], **options)
    assert answer.choices[0].message.content == "15 + 27 = 42"
    assert answer.usage.completion_tokens > 5


def test_reasoning_is_told_apart(litellm: Any, options: dict[str, Any]) -> None:
    message = litellm.completion(messages=[{"role": "user", "content": APPLES}], **options).choices[0].message
    assert "12 + 30 = 42" in message.reasoning_content
    assert "37" in message.content and "<think>" not in message.content


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_tools(litellm: Any, options: dict[str, Any], choice: str) -> None:
    answer = litellm.completion(messages=ADD, tools=TOOLS, tool_choice=choice, **options)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "add_numbers" and json.loads(call.function.arguments) == {"a": 12, "b": 30}
    assert answer.choices[0].finish_reason == "tool_calls"


def test_streamed_tools(litellm: Any, options: dict[str, Any]) -> None:
    chunks = list(litellm.completion(messages=ADD, tools=TOOLS, stream=True, **options))
    whole = litellm.stream_chunk_builder(chunks, messages=ADD)
    (call,) = whole.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"a": 12, "b": 30}


def test_a_class_as_response_format(litellm: Any, options: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": PERSON}]
    answer = litellm.completion(messages=messages, response_format=Person, **options)
    assert Person.model_validate_json(answer.choices[0].message.content) == Person(name="Ada", age=36)


def test_many_at_once(litellm: Any, options: dict[str, Any]) -> None:
    async def ask() -> list[Any]:
        messages = [[{"role": "user", "content": f"What is {n}+1?"}] for n in range(8)]
        return await asyncio.gather(*(litellm.acompletion(messages=each, **options) for each in messages))

    answers = [answer.choices[0].message.content for answer in asyncio.run(ask())]
    assert answers == [f"{n} + 1 = {n + 1}" for n in range(8)]


def test_errors_keep_their_class(litellm: Any, options: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(messages=ADD, **{**options, "temperature": -1})
    for words, longest in ((9_000, 200), (40_000, 200), (4_090, 1)):
        messages = [{"role": "user", "content": "again " * words}]
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion(messages=messages, **{**options, "max_tokens": longest})
    # The whole context is asked for by clients that know no better: the answer ends where the context does.
    assert litellm.completion(messages=ADD, **{**options, "max_tokens": 4_096}).choices[0].message.content


def test_anthropics_form(litellm: Any, options: dict[str, Any], base_url: str) -> None:
    anthropic = {**options, "model": f"anthropic/{MODEL}", "api_base": base_url.removesuffix("/v1")}
    answer = litellm.completion(messages=ADD, tools=TOOLS, **anthropic)
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"a": 12, "b": 30}


def test_text_completion(litellm: Any, options: dict[str, Any]) -> None:
    text = {**options, "model": f"text-completion-openai/{MODEL}", "max_tokens": 8}
    answer = litellm.text_completion(prompt="Question: What is 2+2?\nAnswer:", **text)
    assert isinstance(answer.choices[0].text, str)
