"""langchain-openai: models with tools, structured output and streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from .conftest import MODEL, PERSON

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1800)]

ADD = "Use the tool to add 12 and 30."


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@pytest.fixture(scope="module")
def model(base_url: str) -> Iterator[Any]:
    from langchain_openai import ChatOpenAI

    yield ChatOpenAI(
        model=MODEL,
        base_url=base_url,
        api_key="none",
        temperature=0,
        max_tokens=200,
        max_retries=0,
        timeout=300,
        stream_usage=True,
    )


@pytest.fixture(scope="module")
def add() -> Any:
    from langchain_core.tools import tool

    @tool
    def add_numbers(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    return add_numbers


def test_invoke(model: Any) -> None:
    message = model.invoke("What is 15+27?")
    assert message.content == "15 + 27 = 42"
    assert message.usage_metadata["output_tokens"] > 5
    assert message.response_metadata["finish_reason"] == "stop"


@pytest.mark.parametrize("choice", [None, "auto", "required", "add_numbers"])
def test_bind_tools(model: Any, add: Any, choice: str | None) -> None:
    message = model.bind_tools([add], **({} if choice is None else {"tool_choice": choice})).invoke(ADD)
    (call,) = message.tool_calls
    assert (call["name"], call["args"]) == ("add_numbers", {"a": 12, "b": 30})
    assert message.invalid_tool_calls == []


def test_bind_strict_tools(model: Any, add: Any) -> None:
    (call,) = model.bind_tools([add], strict=True).invoke(ADD).tool_calls
    assert call["args"] == {"a": 12, "b": 30}


def test_an_agents_loop(model: Any, add: Any) -> None:
    from langchain_core.messages import HumanMessage

    bound = model.bind_tools([add])
    messages: list[Any] = [HumanMessage(ADD)]
    messages.append(bound.invoke(messages))
    messages += [add.invoke(call) for call in messages[-1].tool_calls]
    assert "42" in bound.invoke(messages).content


def test_streamed_calls_add_up(model: Any, add: Any) -> None:
    chunks = list(model.bind_tools([add]).stream(ADD))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert len(chunks) > 3
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("add_numbers", {"a": 12, "b": 30})]
    assert whole.usage_metadata["output_tokens"] > 5


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_with_structured_output(model: Any, method: str) -> None:
    person = model.with_structured_output(Person, method=method).invoke(PERSON)
    assert person == Person(name="Ada", age=36)


@pytest.mark.asyncio
async def test_batches_and_async(model: Any) -> None:
    answers = await model.abatch(["What is 2+2?", "What is 3+4?", "What is the capital of France?"])
    assert [answer.content for answer in answers] == ["2 + 2 = 4", "3 + 4 = 7", "The capital of France is Paris."]


def test_the_responses_api(base_url: str, add: Any) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model=MODEL, base_url=base_url, api_key="none", temperature=0, max_retries=0, use_responses_api=True
    )
    assert model.invoke("What is 15+27?").text == "15 + 27 = 42"
    (call,) = model.bind_tools([add]).invoke(ADD).tool_calls
    assert (call["name"], call["args"]) == ("add_numbers", {"a": 12, "b": 30})


def test_completions(base_url: str) -> None:
    from langchain_openai import OpenAI

    model = OpenAI(model=MODEL, base_url=base_url, api_key="none", temperature=0, max_tokens=8, max_retries=0)
    assert isinstance(model.invoke("Question: What is 2+2?\nAnswer:"), str)
