"""Anthropic's conversations as chat requests, and its streams as events, without a server."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sglang.srt.entrypoints.anthropic import message_parts
from sglang.srt.entrypoints.anthropic.conversation import chat_request
from sglang.srt.entrypoints.anthropic.protocol import MessagesRequest
from sglang.srt.entrypoints.http_body import parse_body
from sglang.srt.entrypoints.http_errors import ApiError, error_body, error_event
from sglang.srt.managers.front.generate_request import RequestError
from sglang.srt.managers.wire.io_struct import FinishReason

HISTORY = [
    {"role": "user", "content": [{"type": "text", "text": "Time"}, {"type": "text", "text": "in Rome?"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_1", "name": "clock", "input": {"city": "Rome"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no clock", "is_error": True},
            {"type": "text", "text": "Guess."},
        ],
    },
]


def translated(**fields: Any) -> Any:
    body = {"model": "m", "max_tokens": 5, "messages": HISTORY, **fields}
    return chat_request(parse_body(msgspec.json.encode(body), MessagesRequest))


def test_conversation() -> None:
    system = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"id": "toolu_1", "type": "function", "function": {"name": "clock", "arguments": {"city": "Rome"}}}
    assert translated(system=system).messages == [
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "Time\nin Rome?"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "toolu_1", "name": "clock", "content": "Error: no clock"},
        {"role": "user", "content": "Guess."},
    ]


@pytest.mark.parametrize(
    ("fields", "kept_s"),
    [
        ({}, 0.0),
        ({"cache_control": {"type": "ephemeral"}}, 300.0),
        ({"system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]}, 3600.0),
        ({"system": [{"type": "text", "text": "a", "cache_control": None}]}, 0.0),
        ({"tools": [{"name": "a", "input_schema": {}, "cache_control": {"type": "ephemeral"}}]}, 300.0),
    ],
)
def test_a_prompt_with_a_cache_control_is_kept(fields: dict[str, Any], kept_s: float) -> None:
    assert translated(**fields).keep_s == kept_s


def test_options() -> None:
    tool = {"name": "clock", "description": "d", "input_schema": {"type": "object"}, "strict": True}
    request = translated(
        tools=[tool],
        tool_choice={"type": "tool", "name": "clock", "disable_parallel_tool_use": True},
        thinking={"type": "disabled"},
        stop_sequences=["x"],
        output_config={"effort": "high"},
        temperature=0.5,
        top_p=0.25,
        top_k=3,
    )
    function = {"name": "clock", "description": "d", "parameters": {"type": "object"}, "strict": True}
    assert request.tools == [{"type": "function", "function": function}]
    assert list(request.tools[0]["function"]) == ["name", "description", "parameters", "strict"]
    assert request.tool_choice.function.name == "clock" and request.parallel_tool_calls is False
    assert request.chat_template_kwargs == {"enable_thinking": False, "thinking": False}
    assert (request.stop, request.reasoning_effort, request.max_tokens) == (["x"], "high", 5)
    assert (request.temperature, request.top_p, request.top_k) == (0.5, 0.25, 3)
    assert translated().chat_template_kwargs is None


@pytest.mark.parametrize(
    ("finish", "has_calls", "reason", "sequence"),
    [
        (FinishReason("stop", matched=7), False, "end_turn", None),
        (FinishReason("stop", matched="model's own"), False, "end_turn", None),
        (FinishReason("stop", matched="x"), False, "stop_sequence", "x"),
        (FinishReason("stop", matched=7), True, "tool_use", None),
        (FinishReason("length", length=5), True, "max_tokens", None),
    ],
)
def test_endings(finish: FinishReason, has_calls: bool, reason: str, sequence: str | None) -> None:
    ending = message_parts.ending(finish, has_calls, ["x"])
    assert ending == {"stop_reason": reason, "stop_sequence": sequence}


def test_an_aborted_answer_is_an_error() -> None:
    with pytest.raises(RequestError, match="aborted"):
        message_parts.ending(FinishReason("abort"), False, None)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (415, "invalid_request_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_errors(status: int, kind: str) -> None:
    error = ApiError(status, "no")
    body = {"type": "error", "error": {"type": kind, "message": "no"}}
    assert error_body("/v1/messages/count_tokens", error) == body
    assert error_event("/v1/messages", error) == b"event: error\ndata: " + msgspec.json.encode(body) + b"\n\n"
