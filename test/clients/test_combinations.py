"""Tools, formats of the answer and everything that they are combined with: each pair, over a socket, many at once."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest
from live_server import LiveServer, live_server

from .conftest import MODEL

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1800)]

AT_ONCE = 16
FIXED = {"model": MODEL, "temperature": 0, "max_tokens": 160}
ADD = [{"role": "user", "content": "Use the tool to add 12 and 30."}]
APPLES = [
    {
        "role": "user",
        "content": "Tom has 12 apples. He buys 30 more and then gives 5 away. How many does he have now?",
    }
]


@dataclass
class Choice:
    """What a client puts together of one choice."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    """Name and arguments."""
    finish: str = ""
    num_logprobs: int = 0


@dataclass
class Answer:
    choices: dict[int, Choice]
    completion_tokens: int


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def served(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    parsers = ("--tool-call-parser", "auto", "--reasoning-parser", "auto", "--served-model-name", MODEL)
    with live_server(*parsers, "--grammar-backend", request.param) as running:
        yield running


def answers(server: LiveServer, requests: list[dict[str, Any]]) -> list[Answer]:
    async def work() -> list[Answer]:
        places = asyncio.Semaphore(AT_ONCE)

        async def one(body: dict[str, Any]) -> Answer:
            async with places:
                return await (_streamed if body.get("stream") else _whole)(client, {**FIXED, **body})

        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*map(one, requests))

    return asyncio.run(work())


async def _whole(client: openai.AsyncOpenAI, body: dict[str, Any]) -> Answer:
    completion = await client.chat.completions.create(**body)
    choices = {}
    for given in completion.choices:
        message = given.message
        choices[given.index] = Choice(
            message.content or "",
            (message.model_extra or {}).get("reasoning_content") or "",
            [[call.function.name, call.function.arguments] for call in message.tool_calls or ()],  # type: ignore[union-attr]
            given.finish_reason,
            len(given.logprobs.content or ()) if given.logprobs else 0,
        )
    assert completion.usage is not None
    return Answer(choices, completion.usage.completion_tokens)


async def _streamed(client: openai.AsyncOpenAI, body: dict[str, Any]) -> Answer:
    choices: defaultdict[int, Choice] = defaultdict(Choice)
    num_tokens = 0
    async for chunk in await client.chat.completions.create(**body, stream_options={"include_usage": True}):
        num_tokens = chunk.usage.completion_tokens if chunk.usage else num_tokens
        for given in chunk.choices:
            choice, delta = choices[given.index], given.delta
            choice.content += delta.content or ""
            choice.reasoning += (delta.model_extra or {}).get("reasoning_content") or ""
            choice.finish = given.finish_reason or choice.finish
            choice.num_logprobs += len(given.logprobs.content or ()) if given.logprobs else 0
            for call in delta.tool_calls or ():
                if call.id is not None:
                    choice.calls.append([call.function.name, ""])
                else:
                    choice.calls[call.index][1] += call.function.arguments
    return Answer(dict(choices), num_tokens)


def tools(strict: bool) -> list[dict[str, Any]]:
    def function(name: str, **properties: Any) -> dict[str, Any]:
        schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        spec = {"name": name, "description": "Adds two numbers.", "parameters": schema}
        return {"type": "function", "function": {**spec, **({"strict": True} if strict else {})}}

    return [
        function("add_numbers", a={"type": "integer"}, b={"type": "integer"}),
        function("get_time", city={"type": "string"}),
    ]


PARAMETERS = {"add_numbers": {"a", "b"}, "get_time": {"city"}}
NAMED = {"type": "function", "function": {"name": "add_numbers"}}


def test_every_choice_of_tools(served: LiveServer) -> None:
    """tool_choice x parallel calls x strict: what is forced comes, what is excluded does not, and a stream is the whole
    answer."""
    combinations = list(itertools.product((None, "none", "auto", "required", NAMED), (True, False), (True, False)))
    bodies = [
        {"messages": ADD, "tools": tools(strict), "parallel_tool_calls": parallel}
        | ({} if choice is None else {"tool_choice": choice})
        for choice, parallel, strict in combinations
    ]
    results = answers(served, [{**body, "stream": stream} for stream in (False, True) for body in bodies])
    wholes, streams = results[: len(bodies)], results[len(bodies) :]
    for (choice, parallel, strict), whole, stream in zip(combinations, wholes, streams, strict=True):
        case = f"{choice}, parallel {parallel}, strict {strict}: {whole}"
        assert stream == whole, f"{case}, {stream}"
        (answer,) = whole.choices.values()
        assert answer.finish == ("tool_calls" if answer.calls else "stop"), case
        assert all(PARAMETERS[name] == set(json.loads(text)) for name, text in answer.calls), case
        if choice == "none":
            assert answer.calls == [] and answer.content, case
        else:
            assert answer.calls and answer.calls[0][0] == "add_numbers", case
        if choice is NAMED or not parallel:
            assert len(answer.calls) <= 1, case


def _is_choice_of_fruit(text: str) -> bool:
    return json.loads(text) in [{"fruit": "apple"}, {"fruit": "pear"}]


FRUIT = {
    "type": "object",
    "properties": {"fruit": {"enum": ["apple", "pear"]}},
    "required": ["fruit"],
    "additionalProperties": False,
}
TAG = {"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "[a-z]{3}"}, "end": "</a>"}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "text": ({"response_format": {"type": "text"}}, lambda text: True),
    "json_object": ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
    "json_schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": FRUIT}}},
        _is_choice_of_fruit,
    ),
    "structural_tag": (
        {"response_format": {"type": "structural_tag", "format": TAG}},
        lambda text: bool(re.fullmatch("<a>[a-z]{3}</a>", text)),
    ),
    "regex": (
        {"extra_body": {"regex": "It is [0-9]{2}"}},
        lambda text: bool(re.fullmatch("It is [0-9]{2}", text)),
    ),
    "ebnf": ({"extra_body": {"ebnf": 'root ::= "yes" | "no"'}}, lambda text: text in ("yes", "no")),
}
"""What a request says, and whether an answer is what it asked for."""
ENDLESS = ("text", "json_object")
"""What a small model may not come to the end of."""

BUDGET = {"thinking_budget": 60}
"""Tokens: a small model does not come out of all its thoughts by itself."""

PAIRS = [(bool(a), bool(b), bool(c), bool(a ^ b), bool(a ^ c)) for a, b, c in itertools.product((0, 1), repeat=3)]
"""Of five switches: every pair of them in each of its four positions."""


def test_every_format_of_the_answer(served: LiveServer) -> None:
    """response_format with n, log probabilities, streams, limited thoughts and tools: the grammar holds behind the
    thoughts, every token has its log probability, and the model calls or answers in the format."""
    cases = list(itertools.product(FORMATS, PAIRS))
    bodies = []
    for name, (several, logprobs, stream, thinks, has_tools) in cases:
        fields = FORMATS[name][0]
        extra = {**fields.get("extra_body", {}), "chat_template_kwargs": {"enable_thinking": thinks}, **BUDGET}
        body = {**fields, "messages": APPLES, "n": 2 if several else 1, "logprobs": logprobs, "stream": stream}
        bodies.append({**body, "extra_body": extra, **({"tools": tools(True)} if has_tools else {})})
    for (name, switches), answer in zip(cases, answers(served, bodies), strict=True):
        several, logprobs, _, thinks, has_tools = switches
        case = f"{name} {switches}: {answer}"
        assert len(answer.choices) == (2 if several else 1), case
        for choice in answer.choices.values():
            assert bool(choice.reasoning) == thinks, case
            assert choice.finish in ("stop", "tool_calls") or name in ENDLESS, case
            if choice.finish == "length":
                continue
            if choice.calls:
                assert has_tools and all(PARAMETERS[called] == set(json.loads(text)) for called, text in choice.calls)
            else:
                assert FORMATS[name][1](choice.content), case
        num_logprobs = sum(choice.num_logprobs for choice in answer.choices.values())
        assert num_logprobs == (answer.completion_tokens if logprobs else 0), case


def test_the_switches_come_in_every_pair() -> None:
    for first, second in itertools.combinations(range(5), 2):
        assert len({(row[first], row[second]) for row in PAIRS}) == 4
