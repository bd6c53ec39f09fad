"""What agents use of the `openai` package beyond plain calls: parse helpers, stream events, asynchronous tool loops."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field

from .conftest import MODEL, PERSON

ADD = [{"role": "user", "content": "Use the tool to add 12 and 30."}]


class Person(BaseModel):
    name: str
    age: int = Field(ge=0)


ADA = [{"role": "user", "content": PERSON}]


class AddNumbers(BaseModel):
    """Adds two numbers."""

    a: int
    b: int


TOOLS = [openai.pydantic_function_tool(AddNumbers, name="add_numbers")]


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=300) as made:
        yield made


def test_parse_into_a_class(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=ADA, response_format=Person, temperature=0, max_tokens=200
    )
    person = answer.choices[0].message.parsed
    assert person == Person(name="Ada", age=36)


def test_parse_arguments_of_a_strict_tool(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=ADD, tools=TOOLS, temperature=0, max_tokens=200)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.parsed_arguments == AddNumbers(a=12, b=30)


def test_a_stream_parsed_as_it_comes(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=ADA, response_format=Person, temperature=0, max_tokens=200
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert isinstance(final.choices[0].message.parsed, Person)


def test_a_streamed_tool_call_is_parsed(client: openai.OpenAI) -> None:
    arguments: list[Any] = []
    with client.chat.completions.stream(
        model=MODEL, messages=ADD, tools=TOOLS, temperature=0, max_tokens=200
    ) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.done":
                arguments.append(event.parsed_arguments)
    assert arguments == [AddNumbers(a=12, b=30)]


def test_an_answer_that_is_cut_off_raises_the_clients_own_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=MODEL, messages=ADA, response_format=Person, temperature=0, max_tokens=3)


async def _tool_loop(client: openai.AsyncOpenAI, a: int, b: int) -> str:
    """Asks, calls the function that the model names, and asks again with its result."""
    messages: list[Any] = [{"role": "user", "content": f"Use the tool to add {a} and {b}."}]
    answer = await client.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, temperature=0, max_tokens=200
    )
    message = answer.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls:
        numbers = json.loads(call.function.arguments)
        messages.append(
            {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"result": numbers["a"] + numbers["b"]})}
        )
    parts = []
    async for chunk in await client.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, temperature=0, max_tokens=200, stream=True
    ):
        parts.append(chunk.choices[0].delta.content or "")
    return "".join(parts)


@pytest.mark.asyncio
async def test_agents_at_once(base_url: str) -> None:
    sums = [(12, 30), (7, 5), (20, 21), (33, 11)]
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=300) as client:
        answers = await asyncio.gather(*(_tool_loop(client, a, b) for a, b in sums))
    for (a, b), answer in zip(sums, answers, strict=True):
        assert str(a + b) in answer
