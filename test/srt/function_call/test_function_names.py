"""A function of any name is called in a format as it is written there, or the request is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang.srt.entrypoints.http_errors import ApiError
from sglang.srt.entrypoints.openai.chat_call import check_tools
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.function_call.forcing import FORCED_CALLS
from sglang.srt.function_call.names import unwritable
from sglang.srt.function_call.output import MAX_HEADER
from sglang.srt.function_call.parser import OutputParser, parse
from sglang.srt.function_call.registry import TOOL_CALL_FORMATS
from srt.function_call.outputs import MESSAGE_FORMATS, WRITERS
from srt.function_call.test_forcing import compiled, is_text_of, written

PLAIN = ("a.b", "mcp:x/y", "a-b", "mcp__server__tool", "functions.f", "a:1", "1", "x" * 256, "ä", "🗼")
"""Names that every format has a form for."""
UNUSUAL = (
    'a"b',
    "a\\b",
    "a\nb",
    "a<b>",
    "a]b",
    "a'b",
    "",
    " a",
    "a b",
    "NAME",
    "ESCAPED",
    "x" * 600,
    "user",
    "self",
    'a">b',
)
JSON_FORMATS = ("apertus2509", "gigachat3", "hermes", "interns1", "llama3", "qwen25")
"""Formats with the name in a JSON string and nowhere else."""
SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"], "additionalProperties": False}
ARGUMENTS = {"x": "v"}


def is_read(form: str, name: str) -> bool:
    calls = TOOL_CALL_FORMATS[form]
    reasoning = calls if form in MESSAGE_FORMATS else None
    call = (name, ARGUMENTS)
    text = written(form, call) if form in FORCED_CALLS else WRITERS[form].calls([call])
    output = parse(OutputParser(calls=calls, tools={name: SCHEMA}, reasoning=reasoning), text)  # type: ignore[arg-type]
    return not output.text and [(call.name, json.loads(call.arguments)) for call in output.calls] == [(name, ARGUMENTS)]


def request(name: str, **options: Any) -> ChatCompletionRequest:
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}}]
    return ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], tools=tools, **options)


@pytest.mark.parametrize("form", TOOL_CALL_FORMATS)
def test_names_are_read_or_refused(form: str) -> None:
    assert unwritable(form, PLAIN) is None
    for name in PLAIN + UNUSUAL:
        is_writable = unwritable(form, [name]) is None
        assert is_writable == (len(name) <= MAX_HEADER and is_read(form, name)), name[:64]


@pytest.mark.parametrize("form", FORCED_CALLS)
def test_grammars_have_names_as_they_are_written(form: str) -> None:
    names = [name for name in PLAIN + UNUSUAL if unwritable(form, [name]) is None]
    for grammar in (FORCED_CALLS[form].at_least_one, FORCED_CALLS[form].among_text):
        calls = compiled(grammar(dict.fromkeys(names, SCHEMA), one=True))
        for name in names:
            assert is_text_of(calls, written(form, (name, ARGUMENTS))), name
        assert not is_text_of(calls, written(form, (names[0], {"x": 5, "y": 5})))


@pytest.mark.parametrize("form", JSON_FORMATS)
def test_json_has_every_name(form: str) -> None:
    assert unwritable(form, [name for name in PLAIN + UNUSUAL if len(name) <= MAX_HEADER]) is None


def test_a_request_with_a_name_that_cannot_be_written() -> None:
    with pytest.raises(ApiError, match=r"function name 'a\\nb' cannot be written in calls like mistral's") as error:
        check_tools("mistral", request("a\nb"))
    assert error.value.status == 400
    for calls_name in ("hermes", None):
        check_tools(calls_name, request("a\nb"))
    check_tools("mistral", request("a\nb", tool_choice="none"))
