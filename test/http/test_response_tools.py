"""Tools of agents over `/v1/responses`, as OpenAI's client reads the calls, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from scripted.server import ScriptedServer, scripted_server


def written(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


PATCH = '*** Begin Patch\n*** Update File: a.py\n@@\n-x = "1"\n+x = "2"\n*** End Patch'
SCRIPT = [
    ("close it", written("agents__close", {"id": 7})),
    ("patch it", written("apply_patch", {"input": PATCH})),
    ("list it", written("local_shell", {"command": ["ls", "-l"]})),
    ("find it", written("tool_search", {"query": "agents"})),
    ("the result", "I see."),
]
CLOSE = {
    "type": "function",
    "name": "close",
    "parameters": {"type": "object", "properties": {"id": {"type": "integer"}}},
}
TOOLS: Any = [
    {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [CLOSE]},
    {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": {"type": "text"}},
    {"type": "local_shell"},
    {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}},
    {"type": "web_search"},
    {"type": "image_generation"},
]
CASES: list[tuple[str, dict[str, Any], list[str]]] = [
    (
        "close it",
        {"type": "function_call", "name": "close", "namespace": "agents", "arguments": '{"id": 7}'},
        ["response.function_call_arguments.delta", "response.function_call_arguments.done"],
    ),
    (
        "patch it",
        {"type": "custom_tool_call", "name": "apply_patch", "input": PATCH},
        ["response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"],
    ),
    (
        "list it",
        {"type": "local_shell_call", "action": {"type": "exec", "command": ["ls", "-l"], "env": {}}},
        [],
    ),
    ("find it", {"type": "tool_search_call", "execution": "client", "arguments": {"query": "agents"}}, []),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with scripted_server(tmp_path_factory.mktemp("server"), SCRIPT, "--tool-call-parser", "auto") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ScriptedServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as made:
        yield made


@pytest.mark.parametrize(("ask", "fields", "_events"), CASES)
def test_call(client: openai.OpenAI, ask: str, fields: dict[str, Any], _events: list[str]) -> None:
    answer = client.responses.create(model="tiny", input=ask, tools=TOOLS)
    (item,) = answer.output
    given = item.to_dict()
    assert given == {**given, **fields}
    output_type = fields["type"].removesuffix("_call").replace("function", "function_call") + "_output"
    names = {"local_shell_output": "local_shell_call_output", "custom_tool_output": "custom_tool_call_output"}
    result: Any = {"type": names.get(output_type, output_type), "call_id": given["call_id"], "output": "the result"}
    if output_type == "tool_search_output":
        result = {**result, "tools": [{**CLOSE, "description": "the result"}]}
    told = client.responses.create(model="tiny", input=[{"role": "user", "content": ask}, given, result], tools=TOOLS)
    assert told.output_text == "I see."
    continued = client.responses.create(model="tiny", input=[result], previous_response_id=answer.id, tools=TOOLS)
    assert continued.output_text == "I see."


@pytest.mark.parametrize(("ask", "fields", "events"), CASES)
def test_stream(client: openai.OpenAI, ask: str, fields: dict[str, Any], events: list[str]) -> None:
    sent = list(client.responses.create(model="tiny", input=ask, tools=TOOLS, stream=True))
    kinds = [event.type for event in sent]
    assert list(dict.fromkeys(kinds))[2:-1] == ["response.output_item.added", *events, "response.output_item.done"]
    done: Any = next(event for event in sent if event.type == "response.output_item.done")
    added: Any = next(event for event in sent if event.type == "response.output_item.added")
    assert done.item.to_dict() == {**done.item.to_dict(), **fields}
    assert (added.item.type, added.item.id) == (done.item.type, done.item.id)
    last: Any = sent[-1]
    assert last.response.output[0].to_dict() == done.item.to_dict()
    deltas = "".join(event.delta for event in sent if event.type.endswith(".delta"))
    assert deltas == (fields.get("arguments") or fields.get("input")) or not events


def test_the_response_repeats_the_tools(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="tiny", input="no tool", tools=TOOLS)
    assert [tool.type for tool in answer.tools] == [tool["type"] for tool in TOOLS]


def test_the_log_names_what_is_left_out(server: ScriptedServer, client: openai.OpenAI) -> None:
    client.responses.create(model="tiny", input="no tool", tools=TOOLS)
    assert server.server.log().count("Tools of type web_search run at OpenAI's servers") == 1
