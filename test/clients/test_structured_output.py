"""A class as the form of the answer, through the helpers of each client: no limit of tokens is sent, the sampling is
the model's own, and the schema stands in no message.

instructor and openai-agents want another version of openai than the rest, so they run in an environment of their own
(helpers.py)."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from live_server import LiveServer
from pydantic import BaseModel

from .conftest import MODEL
from .helpers import HELPERS

ROOT = Path(__file__).parents[2]
HELPERS_PYTHON = Path(os.environ.get("CLIENT_HELPERS", ROOT / "build" / "client-helpers")) / "bin" / "python"
"""CLIENT_HELPERS: the environment in which instructor and openai-agents are installed."""
LIMIT_S = 60
"""An answer takes a second; one that does not end would take minutes."""
BY_A_CLIENT_THAT_IS_LARGE = [pytest.mark.clients, pytest.mark.timeout(600)]


class Person(BaseModel):
    name: str
    age: int


PEOPLE = {"Ada is 36 years old.": Person(name="Ada", age=36), "Rosa is 34.": Person(name="Rosa", age=34)}
"""Behind the second the model went on thinking to the end of its context when thoughts had no limit."""


def messages(text: str) -> Any:
    return [{"role": "user", "content": text}]


def connect(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=LIMIT_S)


def chat(url: str, text: str) -> Any:
    with connect(url) as client:
        answer = client.chat.completions.parse(model=MODEL, messages=messages(text), response_format=Person)
        return answer.choices[0].message.parsed


def streamed_chat(url: str, text: str) -> Any:
    with (
        connect(url) as client,
        client.chat.completions.stream(model=MODEL, messages=messages(text), response_format=Person) as stream,
    ):
        return stream.get_final_completion().choices[0].message.parsed


def responses(url: str, text: str) -> Any:
    with connect(url) as client:
        return client.responses.parse(model=MODEL, input=text, text_format=Person).output_parsed


def streamed_responses(url: str, text: str) -> Any:
    with connect(url) as client, client.responses.stream(model=MODEL, input=text, text_format=Person) as stream:
        return stream.get_final_response().output_parsed


def anthropic_messages(url: str, text: str) -> Any:
    import anthropic

    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=LIMIT_S) as client:
        answer: Any = client.messages.parse(model=MODEL, max_tokens=3000, messages=messages(text), output_format=Person)
        return answer.parsed_output


def ollama_chat(url: str, text: str, stream: bool) -> Any:
    import ollama

    client = ollama.Client(host=url, timeout=LIMIT_S)
    pieces: Any = client.chat(model=MODEL, messages=messages(text), format=Person.model_json_schema(), stream=stream)
    answer = "".join(piece.message.content or "" for piece in (pieces if stream else [pieces]))
    return Person.model_validate_json(answer)


def ollama_prompt(url: str, text: str) -> Any:
    import ollama

    client = ollama.Client(host=url, timeout=LIMIT_S)
    answer = client.generate(model=MODEL, prompt=text, format=Person.model_json_schema())
    return Person.model_validate_json(answer.response)


def langchain(url: str, text: str, method: str, responses_api: bool = False) -> Any:
    from langchain_openai import ChatOpenAI

    model: Any = ChatOpenAI(
        model=MODEL,
        base_url=f"{url}/v1",
        api_key="none",
        max_retries=0,
        timeout=LIMIT_S,
        use_responses_api=responses_api,
    )
    return model.with_structured_output(Person, method=method).invoke(text)


def helper(url: str, text: str, name: str) -> Any:
    if not HELPERS_PYTHON.exists():
        pytest.skip("instructor and openai-agents are not installed: make clients")
    program = str(Path(__file__).with_name("helpers.py"))
    isolated = [str(HELPERS_PYTHON), "-I", program]  # neither this repository's packages nor agents.py beside it
    run = subprocess.run(
        [*isolated, name, f"{url}/v1", MODEL, text], capture_output=True, text=True, timeout=2 * LIMIT_S
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return Person.model_validate_json(run.stdout)


SMALL: dict[str, Callable[[str, str], Any]] = {
    "openai chat": chat,
    "openai streamed chat": streamed_chat,
    "openai responses": responses,
    "openai streamed responses": streamed_responses,
    "anthropic": anthropic_messages,
    "ollama": lambda *asked: ollama_chat(*asked, False),
    "ollama streamed": lambda *asked: ollama_chat(*asked, True),
    "ollama prompt": ollama_prompt,
}
LARGE: dict[str, Callable[[str, str], Any]] = {
    "langchain json_schema": lambda *asked: langchain(*asked, "json_schema"),
    "langchain function_calling": lambda *asked: langchain(*asked, "function_calling"),
    "langchain responses": lambda *asked: langchain(*asked, "json_schema", True),
    **{name: functools.partial(helper, name=name) for name in HELPERS},
}


@pytest.mark.parametrize("text", PEOPLE)
def test_an_object_without_a_schema_ends(served: LiveServer, text: str) -> None:
    with connect(served.url) as client:
        form: Any = {"type": "json_object"}
        answer = client.chat.completions.create(model=MODEL, messages=messages(text), response_format=form)
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


@pytest.mark.values
@pytest.mark.parametrize("text", PEOPLE)
@pytest.mark.parametrize("name", [*SMALL, *(pytest.param(name, marks=BY_A_CLIENT_THAT_IS_LARGE) for name in LARGE)])
def test_a_class_is_filled_in(served: LiveServer, name: str, text: str) -> None:
    assert (SMALL | LARGE)[name](served.url, text) == PEOPLE[text]
