"""Tools of the Responses API as functions, and calls as their items, without a server."""

from __future__ import annotations

import json
import logging
import tracemalloc
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from openai.types.responses import response_input_item_param, tool

from sglang.srt.entrypoints.http_errors import ApiError
from sglang.srt.entrypoints.responses import tools as response_tools
from sglang.srt.entrypoints.responses.conversation import chat_request
from sglang.srt.entrypoints.responses.protocol import HOSTED_CALLS, ITEMS, ResponsesRequest, read_items
from sglang.srt.entrypoints.responses.tools import TOOL_TYPES, ResponseTool, ToolCatalog, fill

REFUSED_TOOLS = {"computer", "computer_use_preview"}
REFUSED_ITEMS = {
    *("computer_call", "computer_call_output", "compaction", "compaction_trigger", "configuration_update"),
    "item_reference",
}
USER = {"role": "user", "content": "a"}
CLOSE = {"type": "function", "name": "close", "description": "d", "parameters": {"type": "object"}}
AGENTS = {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [CLOSE]}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin"'}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": GRAMMAR}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds.", "parameters": {"type": "object"}}


def types_in(union: Any) -> set[str]:
    """The values of `type` in a union of the client's."""
    found: set[str] = set()
    for kind in get_args(union):
        if not isinstance(kind, type):
            found |= types_in(kind)
            continue
        fields = getattr(kind, "model_fields", None)  # of pydantic; a TypedDict has none
        hint = fields["type"].annotation if fields else get_type_hints(kind)["type"]
        found |= {word for each in [hint, *get_args(hint)] for word in get_args(each) if isinstance(word, str)}
        found |= {word for word in get_args(hint) if isinstance(word, str)}
    return found


def request(tools: list[Any], items: list[Any] | None = None, **fields: Any) -> Any:
    body = msgspec.convert({"input": items or [USER], "tools": tools, **fields}, ResponsesRequest)
    return chat_request(body, read_items(body.items()))


def functions(tools: list[Any], items: list[Any] | None = None, **fields: Any) -> dict[str, Any]:
    asked = request(tools, items, **fields).tools
    return {each["function"]["name"]: each["function"] for each in asked}


def call_item(tools: list[Any], name: str, arguments: str) -> dict[str, Any]:
    catalog = ToolCatalog(msgspec.convert(tools, list[ResponseTool]))
    item = catalog.call_item(lambda prefix: f"{prefix}_1", "completed", "call_1", name)
    fill(item, arguments)
    return item


def test_every_tool_of_the_client_has_a_verdict() -> None:
    assert types_in(tool.Tool) == {*TOOL_TYPES} | REFUSED_TOOLS


def test_every_item_of_the_client_has_a_verdict() -> None:
    read = {kind.__struct_config__.tag for kind in ITEMS}
    assert types_in(response_input_item_param.ResponseInputItemParam) == read | HOSTED_CALLS | REFUSED_ITEMS


def test_functions_of_a_namespace() -> None:
    assert functions([AGENTS, CLOSE]) == {
        "agents__close": {"name": "agents__close", "description": "d", "parameters": {"type": "object"}},
        "close": {"name": "close", "description": "d", "parameters": {"type": "object"}},
    }
    assert [*functions([{**AGENTS, "name": "mcp__git__"}])] == ["mcp__git__close"]


def test_a_call_comes_back_with_its_namespace() -> None:
    item = {"id": "fc_1", "type": "function_call", "status": "completed", "call_id": "call_1", "name": "close"}
    assert call_item([AGENTS, CLOSE], "agents__close", "{}") == {**item, "namespace": "agents", "arguments": "{}"}
    assert call_item([AGENTS, CLOSE], "close", "{}") == {**item, "arguments": "{}"}
    assert call_item([AGENTS], "close", "{}") == {**item, "namespace": "agents", "arguments": "{}"}
    assert call_item([AGENTS], "unknown", "{}")["name"] == "unknown"


def test_calls_of_history_have_the_names_that_the_model_wrote() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "close", "namespace": "agents", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": "done"}
    _, turn, told = request([AGENTS], [USER, call, result]).messages
    assert turn["tool_calls"][0]["function"]["name"] == told["name"] == "agents__close"


def test_a_custom_tool_takes_a_text() -> None:
    (function,) = functions([PATCH]).values()
    assert function["parameters"]["properties"] == {"input": {"type": "string"}}
    assert "Edits." in function["description"] and GRAMMAR["definition"] in function["description"]
    (plain,) = functions([{"type": "custom", "name": "note"}]).values()
    assert "grammar" not in plain["description"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "*** Begin\\n\\"x\\""}', '*** Begin\n"x"'),
        ('{"input": "*** Beg', "*** Beg"),
        ('{"patch": "*** Begin"}', "*** Begin"),
        ("*** Begin", "*** Begin"),
        ("{}", "{}"),
    ],
)
def test_calls_of_custom_tools(arguments: str, text: str) -> None:
    item = {"id": "ctc_1", "type": "custom_tool_call", "status": "completed", "call_id": "call_1"}
    assert call_item([PATCH], "apply_patch", arguments) == {**item, "name": "apply_patch", "input": text}


def test_custom_calls_in_history() -> None:
    call = {"type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": 'a "b"\n'}
    result = {"type": "custom_tool_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "done"}]}
    _, turn, told = request([PATCH], [USER, call, result]).messages
    assert json.loads(turn["tool_calls"][0]["function"]["arguments"]) == {"input": 'a "b"\n'}
    assert (told["name"], told["content"]) == ("apply_patch", [{"type": "text", "text": "done"}])


BUILT_IN = [
    ("local_shell", {"command": ["ls"]}, "action", {"type": "exec", "command": ["ls"], "env": {}}, "out"),
    (
        "shell",
        {"commands": ["ls"]},
        "action",
        {"commands": ["ls"], "timeout_ms": None, "max_output_length": None},
        [{"stdout": "out", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
    ),
    ("apply_patch", {"type": "delete_file", "path": "a"}, "operation", {"type": "delete_file", "path": "a"}, "out"),
]


@pytest.mark.parametrize(("kind", "arguments", "field", "written", "output"), BUILT_IN)
def test_tools_that_need_no_description(kind: str, arguments: Any, field: str, written: Any, output: Any) -> None:
    tools = [{"type": kind}]
    (function,) = functions(tools).values()
    assert function["name"] == kind and set(arguments) <= set(function["parameters"]["properties"])
    item = call_item(tools, kind, json.dumps(arguments))
    assert (item["type"], item[field]) == (f"{kind}_call", written)
    result = {"type": f"{kind}_call_output", "call_id": "call_1", "status": "completed", "output": output}
    _, turn, told = request(tools, [USER, item, result]).messages
    assert json.loads(turn["tool_calls"][0]["function"]["arguments"]) == arguments
    assert "out" in told["content"] and told["name"] == kind


def test_tools_that_a_search_finds_are_offered() -> None:
    item = call_item([SEARCH], "tool_search", '{"query": "agents"}')
    assert (item["type"], item["execution"], item["arguments"]) == ("tool_search_call", "client", {"query": "agents"})
    found = {"type": "tool_search_output", "call_id": "call_1", "status": "completed", "tools": [AGENTS]}
    history = [USER, item, found, {**item, "call_id": "call_2"}, {**found, "call_id": "call_2"}]
    assert [*functions([SEARCH], history)] == ["tool_search", "agents__close"]
    assert "agents__close" in request([SEARCH], history).messages[2]["content"]
    assert [*functions([], [USER, {"type": "additional_tools", "role": "developer", "tools": [CLOSE]}])] == ["close"]


def test_what_runs_at_the_provider_is_left_out_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    response_tools._log_left_out.cache_clear()
    hosted = [{"type": kind, "name": "n"} for kind in response_tools.LEFT_OUT]
    hosted += [{"type": "tool_search"}, {"type": "shell", "environment": {"type": "container_auto"}}]
    with caplog.at_level(logging.WARNING):
        assert [*functions([*hosted, CLOSE])] == [*functions([*hosted, CLOSE])] == ["close"]
    assert len(caplog.records) == len(hosted)
    searched = [{"type": kind, "id": "1"} for kind in HOSTED_CALLS]
    server_side = [{"type": "tool_search_call", "arguments": {}}, {"type": "tool_search_output", "tools": []}]
    assert [message["role"] for message in request([], [USER, *searched, *server_side, USER]).messages] == ["user"] * 2


@pytest.mark.parametrize(
    ("choice", "named"),
    [
        ({"type": "function", "name": "agents__close"}, "agents__close"),
        ({"type": "function", "name": "close"}, "agents__close"),
        ({"type": "function", "name": "close", "namespace": "agents"}, "agents__close"),
        ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
    ],
)
def test_a_choice_names_a_tool(choice: Any, named: str) -> None:
    assert request([AGENTS, PATCH], tool_choice=choice).tool_choice.function.name == named


def test_allowed_tools() -> None:
    allowed = {"type": "allowed_tools", "mode": "auto"}
    some = [{"type": "custom", "name": "apply_patch"}, {"type": "web_search"}, {"type": "local_shell"}]
    offered = functions([AGENTS, PATCH, {"type": "local_shell"}], tool_choice={**allowed, "tools": some})
    assert [*offered] == ["apply_patch", "local_shell"]
    with pytest.raises(ApiError, match="'other'"):
        request([AGENTS], tool_choice={**allowed, "tools": [{"type": "function", "name": "other"}]})


@pytest.mark.parametrize("namespace", ["n7", None], ids=["exact", "ambiguous"])
def test_finding_a_tool_does_not_depend_on_their_number(namespace: str | None) -> None:
    spaces = [{**AGENTS, "name": f"n{i}"} for i in range(2000)]
    catalog = ToolCatalog(msgspec.convert(spaces, list[ResponseTool]))
    tracemalloc.start()
    try:
        found = catalog.find("close", namespace)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (found is None) == (namespace is None)
    assert peak < 2000
