"""A call that the server itself cut ends no session: it comes back in the history of every later turn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from scripted.server import TEMPLATES, ScriptedServer, scripted_server

CALL = '<tool_call>\n{"name": "write", "arguments": {"path": "a.py", "text": "x = 1 and much more"}}\n</tool_call>'
TAGGED = (
    "<tool_call>\n<function=write>\n<parameter=path>\na.py\n</parameter>\n<parameter=text>\nx = 1 and much more\n"
    "</parameter>\n</function>\n</tool_call>"
)
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}}
FUNCTION = {"name": "write", "parameters": SCHEMA}
QUESTION = {"role": "user", "content": "Write a file."}
RESULT = "The arguments are broken."
BROKEN = ['{"path": "a.py", "text": "x', "{'path': 'a.py'}", "[" * 300, "path", ""]


@pytest.fixture(scope="module", params=["embedded", "system_first"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    call, flags = (CALL, ("--tool-call-parser", "auto"))
    if request.param != "embedded":
        template = str(TEMPLATES / f"{request.param}.jinja")
        call, flags = (TAGGED, ("--tool-call-parser", "qwen3_coder", "--chat-template", template))
    script = [("Write a file.", call), (RESULT, "I see.")]
    with scripted_server(tmp_path_factory.mktemp("server"), script, *flags) as running:
        yield running


def post(server: ScriptedServer, path: str, **body: Any) -> Any:
    answer = httpx.post(server.url + path, json={"model": "tiny", **body}, timeout=300)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return answer.json()
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("arguments", BROKEN)
def test_chat(server: ScriptedServer, arguments: str) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "write", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "call_1", "content": RESULT}
    history = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    answer = post(server, "/v1/chat/completions", messages=history, tools=[{"type": "function", "function": FUNCTION}])
    assert answer["choices"][0]["message"]["content"] == "I see."


@pytest.mark.parametrize("arguments", BROKEN)
def test_responses(server: ScriptedServer, arguments: str) -> None:
    call = {"type": "function_call", "call_id": "call_1", "name": "write", "arguments": arguments}
    result = {"type": "function_call_output", "call_id": "call_1", "output": RESULT}
    answer = post(server, "/v1/responses", input=[QUESTION, call, result], tools=[{"type": "function", **FUNCTION}])
    assert answer["output"][0]["content"][0]["text"] == "I see."


@pytest.mark.parametrize("given", [*BROKEN, None, ["a"]])
def test_messages(server: ScriptedServer, given: Any) -> None:
    """Clients put there what they could not read."""
    use = {"type": "tool_use", "id": "toolu_1", "name": "write", "input": given}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": RESULT, "is_error": True}
    history = [QUESTION, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    tool = {"name": "write", "input_schema": SCHEMA}
    assert post(server, "/v1/messages", max_tokens=99, messages=history, tools=[tool])["content"][0]["text"] == "I see."


def test_messages_of_claude_code(server: ScriptedServer) -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "write", "input": {"__unparsedToolInput": {"raw": BROKEN[0]}}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": RESULT}
    history = [QUESTION, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    post(server, "/v1/messages", max_tokens=99, messages=history)
    prompt = server.prompts()[-1]["prompt"]
    assert "a.py" in prompt and "__unparsedToolInput" not in prompt


@pytest.mark.parametrize("limit", range(20, 80, 6))
def test_a_call_that_was_cut_goes_on(server: ScriptedServer, limit: int) -> None:
    """Streams have sent half of a call when the limit of tokens comes."""
    tools = [{"type": "function", **FUNCTION}]
    events = post(server, "/v1/responses", input=[QUESTION], tools=tools, stream=True, max_output_tokens=limit)
    output = events[-1]["response"]["output"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": RESULT}
        for item in output
        if item["type"] == "function_call"
    ]
    again = post(server, "/v1/responses", input=[QUESTION, *output, *results], tools=tools)
    assert again["status"] == "completed"
