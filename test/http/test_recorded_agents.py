"""Requests of Claude Code and Codex as these sent them (see test/clients/test_agents.py), with a chat template of each
kind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from scripted.answers import SERVED
from scripted.recording import recorded
from scripted.server import ScriptedServer, scripted_server

ASKED = ("Change alpha to beta in notes.txt.", "What have you done?")
"""The last words of the user in the first request of a session and in the last."""
SYSTEM_ROLES = ("system", "developer")
TOOLS = {"claude": ("Read", "file_path"), "codex": ("exec_command", "cmd")}
"""A tool of each agent, and its argument."""


@pytest.fixture(scope="module", params=TOOLS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=SERVED)
def server(
    request: pytest.FixtureRequest, name: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ScriptedServer]:
    served = SERVED[request.param]
    tool, argument = TOOLS[name]
    call = served.call(tool, **{argument: "cat notes.txt"})
    script = [(ASKED[0], f"I look.\n{call}"), (ASKED[1], "I changed a word.")]
    with scripted_server(tmp_path_factory.mktemp("server"), script, *served.flags) as running:
        yield running


def texts(value: Any) -> Iterator[str]:
    """The texts of messages."""
    if isinstance(value, str):
        yield value
    for part in value if isinstance(value, list) else ():
        yield from texts(part.get("text") or part.get("content") or "")


def pieces(events: str) -> Iterator[str]:
    """The pieces of the arguments in a stream."""
    for line in events.splitlines():
        event = json.loads(line[6:]) if line.startswith("data: {") else {}
        delta = event.get("delta")
        yield (delta.get("partial_json") if isinstance(delta, dict) else delta) or ""


def sent(server: ScriptedServer, name: str, which: int) -> tuple[dict[str, Any], str, str]:
    """The body, the text of the answer's events, and the prompt."""
    entry = recorded(name)[which]
    answer = httpx.post(server.url + entry["path"], json=entry["body"], headers=entry["headers"], timeout=300)
    assert answer.status_code == 200, answer.text
    return entry["body"], answer.text, server.prompts()[-1]["prompt"]


def test_a_session_begins(server: ScriptedServer, name: str) -> None:
    body, events, prompt = sent(server, name, 0)
    assert f'"name":"{TOOLS[name][0]}"' in events and "cat notes.txt" in "".join(pieces(events))
    instructions = [*texts(body.get("system")), *texts(body.get("instructions"))]
    said = [message for message in body.get("messages") or body["input"] if "role" in message]
    for message in said:
        for text in texts(message["content"]):
            assert text in prompt
    instructions += [text for each in said if each["role"] in SYSTEM_ROLES for text in texts(each["content"])]
    assert instructions and all(text in prompt for text in instructions)
    assert ASKED[0] in prompt


def test_a_session_with_calls_goes_on(server: ScriptedServer, name: str) -> None:
    body, events, prompt = sent(server, name, 1)
    assert "I changed a word." in events
    items = body.get("messages") or body["input"]
    results = [item["output"] for item in items if item.get("type", "").endswith("_output")]
    blocks = [block for item in items if isinstance(item.get("content"), list) for block in item["content"]]
    results += [block["content"] for block in blocks if block.get("type") == "tool_result"]
    assert len(results) == 3 and all(text in prompt for result in results for text in texts(result))


def test_codex_has_tools_of_every_kind() -> None:
    kinds = {tool["type"] for tool in recorded("codex")[0]["body"]["tools"]}
    assert kinds >= {"function", "custom", "tool_search", "web_search"}
    items = {item["type"] for item in recorded("codex")[1]["body"]["input"]}
    assert items >= {"message", "function_call", "custom_tool_call", "custom_tool_call_output"}


def test_claude_code_has_system_messages_among_others() -> None:
    body = recorded("claude")[0]["body"]
    assert "system" in body and "system" in [message["role"] for message in body["messages"]]
    assert "context_management" in body
