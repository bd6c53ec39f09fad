"""`context_management`: which thoughts and results go, and what the answer says of it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from sglang.srt.entrypoints.anthropic.context_edits import CLEARED, apply_edits
from sglang.srt.entrypoints.anthropic.conversation import chat_request
from sglang.srt.entrypoints.anthropic.protocol import MessagesRequest
from sglang.srt.entrypoints.http_body import parse_body
from sglang.srt.entrypoints.http_errors import ApiError

THINKING = "clear_thinking_20251015"
TOOL_USES = "clear_tool_uses_20250919"
TOKENS_OF_RESULT = 10


def said(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def thought(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def call(number: int, name: str = "read") -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{number}", "name": name, "input": {"path": str(number)}}


def result(number: int) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": "x" * 9}]}


CONVERSATION = [
    {"role": "user", "content": "a"},
    said(thought("t0"), call(0)),
    result(0),
    said(thought("t1"), call(1, "write")),
    result(1),
    said(thought("t2"), {"type": "text", "text": "done"}),
    {"role": "user", "content": "b"},
    said({"type": "redacted_thinking", "data": "x"}, call(2), call(3)),
    {"role": "user", "content": [*result(2)["content"], *result(3)["content"]]},
    said({"type": "text", "text": "no thoughts"}),
    {"role": "user", "content": "c"},
    said(thought("t3"), call(4)),
    result(4),
]


def edited(*edits: dict[str, Any], messages: Any = CONVERSATION) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The messages that a template reads, and the edits that were applied. A message has one token, a result ten."""
    fields = {"model": "m", "max_tokens": 5, "messages": messages, "context_management": {"edits": list(edits)}}
    body = parse_body(msgspec.json.encode(fields), MessagesRequest)

    async def count() -> int:
        request = chat_request(body)
        whole = sum(message["role"] == "tool" and message["content"] != CLEARED for message in request.messages)
        return len(request.messages) + whole * (TOKENS_OF_RESULT - 1)

    async def off_event_loop(work: Any, *args: Any) -> Any:
        return work(*args)

    applied = asyncio.run(apply_edits(body, count, off_event_loop))
    return chat_request(body).messages, applied


def thoughts(messages: list[dict[str, Any]]) -> list[str]:
    return [message["reasoning_content"] for message in messages if "reasoning_content" in message]


def results(messages: list[dict[str, Any]]) -> str:
    """A character for each result: kept or cleared."""
    return "".join("-" if m["content"] == CLEARED else "+" for m in messages if m["role"] == "tool")


@pytest.mark.parametrize(
    "edits",
    [
        [],
        [{"type": THINKING, "keep": "all"}],
        [{"type": THINKING, "keep": {"type": "all"}}],
        [{"type": THINKING, "keep": {"type": "thinking_turns", "value": 3}}],
        [{"type": TOOL_USES}],
        [
            {
                "type": TOOL_USES,
                "trigger": {"type": "input_tokens", "value": 1000},
                "keep": {"type": "tool_uses", "value": 0},
            }
        ],
        [{"type": TOOL_USES, "trigger": {"type": "tool_uses", "value": 5}, "clear_tool_inputs": True}],
        [{"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 50000}, "instructions": None}],
    ],
)
def test_edits_that_clear_nothing(edits: list[dict[str, Any]]) -> None:
    messages, applied = edited(*edits)
    assert applied == [] and messages == edited()[0]


@pytest.mark.parametrize(("keep", "left", "turns"), [(None, ["t3"], 2), (1, ["t3"], 2), (2, ["t3"], 1)])
def test_thoughts_of_earlier_turns_go(keep: int | None, left: list[str], turns: int) -> None:
    """The second turn has thoughts that only their author can read; a turn goes on behind results of tools."""
    edit = {"type": THINKING, "keep": keep and {"type": "thinking_turns", "value": keep}}
    messages, applied = edited(edit)
    assert thoughts(messages) == left
    assert applied == [{"type": THINKING, "cleared_thinking_turns": turns, "cleared_input_tokens": 0}]
    unedited = edited()[0]
    assert [m["content"] for m in messages] == [m["content"] for m in unedited]


USES = {"type": "tool_uses", "value": 2}
MANY = {"type": TOOL_USES, "trigger": USES}


@pytest.mark.parametrize(
    ("fields", "left", "inputs"),
    [
        ({}, "--+++", [True] * 5),
        ({"keep": {"type": "tool_uses", "value": 0}}, "-----", [True] * 5),
        ({"keep": {"type": "tool_uses", "value": 1}}, "----+", [True] * 5),
        ({"exclude_tools": ["write"]}, "-++++", [True] * 5),
        ({"clear_tool_inputs": True}, "--+++", [False, False, True, True, True]),
        ({"clear_tool_inputs": ["write"]}, "--+++", [True, False, True, True, True]),
        ({"trigger": {"type": "input_tokens", "value": 58}}, "--+++", [True] * 5),
        ({"clear_at_least": {"type": "input_tokens", "value": 18}}, "--+++", [True] * 5),
        ({"trigger": {"type": "input_tokens", "value": 59}}, "+++++", [True] * 5),
        ({"trigger": {"type": "tool_uses", "value": 5}}, "+++++", [True] * 5),
        ({"clear_at_least": {"type": "input_tokens", "value": 19}}, "+++++", [True] * 5),
    ],
)
def test_results_of_older_calls_go(fields: dict[str, Any], left: str, inputs: list[bool]) -> None:
    messages, applied = edited({**MANY, **fields})
    assert results(messages) == left
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    assert [call["function"]["arguments"] != {} for call in calls] == inputs
    number = left.count("-")
    cleared = {"cleared_tool_uses": number, "cleared_input_tokens": number * (TOKENS_OF_RESULT - 1)}
    assert applied == ([{"type": TOOL_USES, **cleared}] if number else [])


def test_edits_are_applied_in_order() -> None:
    messages, applied = edited({"type": THINKING}, MANY)
    assert [edit["type"] for edit in applied] == [THINKING, TOOL_USES]
    assert thoughts(messages) == ["t3"] and results(messages) == "--+++"


@pytest.mark.parametrize(
    ("edits", "reason"),
    [
        ([{"type": "clear_everything"}], r"context_management\.edits"),
        ([MANY, MANY], "each type once"),
        ([{"type": THINKING, "keep": {"type": "thinking_turns", "value": 0}}], r"keep\.value"),
        ([{"type": TOOL_USES, "keep": {"type": "tool_uses", "value": -1}}], r"keep\.value"),
        ([{"type": TOOL_USES, "trigger": {"type": "hours", "value": 1}}], r"trigger\.type"),
    ],
)
def test_edits_that_nobody_defines(edits: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(ApiError, match=reason):
        edited(*edits)
