"""Ids of calls in conversations that were begun with another server, or another model."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from inline_template import InlineTemplate

from sglang.srt.entrypoints.openai.call_ids import with_ids_of_format
from sglang.srt.entrypoints.openai.chat_call import rendered_prompt
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.function_call.model_formats import ModelFormats
from srt.function_call.test_templates import OTHERWISE

KIMI, MISTRAL, HERMES = (ModelFormats(calls_name=name) for name in ("kimi_k2", "mistral", "hermes"))
USER = {"role": "user", "content": "hi"}


def turn(*calls: tuple[Any, str]) -> dict[str, Any]:
    """A message of the assistant with calls (id, name)."""
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}
            for call_id, name in calls
        ],
    }


def result(call_id: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "done"}


def ids(messages: list[dict[str, Any]]) -> list[Any]:
    """Those of calls and results, in their order."""
    return [
        entry.get("id", entry.get("tool_call_id"))
        for message in messages
        for entry in message.get("tool_calls") or ([message] if message["role"] == "tool" else [])
    ]


@pytest.mark.parametrize("foreign", [("call_2", "toolu_01", "call_9"), ("functions.f:7", "f", ""), ("a", "b", None)])
def test_numbered_ids(foreign: tuple[Any, ...]) -> None:
    first, second, third = foreign
    messages = [
        USER,
        turn((first, "f"), (second, "g")),
        result(second),
        result(first),
        turn((third, "f")),
        result(third),
    ]
    before = [dict(message) for message in messages]
    wanted = ["functions.f:0", "functions.g:1", "functions.g:1", "functions.f:0", "functions.f:2"]
    changed = with_ids_of_format(messages, KIMI)
    assert ids(changed) == [*wanted, "functions.f:2"]
    assert messages == before and changed[0] is USER
    assert with_ids_of_format(changed, KIMI) is changed


def test_ids_that_come_again() -> None:
    """Some clients count the calls of each turn from 0; some give all the same id, and results in their order."""
    messages = [turn(("call_0", "f")), result("call_0"), turn(("call_0", "g")), result("call_0")]
    assert ids(with_ids_of_format(messages, KIMI)) == ["functions.f:0"] * 2 + ["functions.g:1"] * 2
    messages = [turn(("", "f"), ("", "g")), result(""), result(""), turn(("", "f"))]
    wanted = ["functions.f:0", "functions.g:1", "functions.f:0", "functions.g:1", "functions.f:2"]
    assert ids(with_ids_of_format(messages, KIMI)) == wanted


def test_results_of_no_call_stay() -> None:
    messages = [result("call_x"), turn(("call_1", "f")), result("call_y"), {"role": "tool", "content": "z"}]
    assert ids(with_ids_of_format(messages, KIMI)) == ["call_x", "functions.f:0", "call_y", None]


def test_calls_without_a_function_are_left_to_the_template() -> None:
    messages = [{"role": "assistant", "tool_calls": [{"id": ["a"]}, {"function": {"name": 5}}, {"function": "f"}]}]
    changed = with_ids_of_format(messages, KIMI)
    assert [call.get("function") for call in changed[0]["tool_calls"]] == [None, {"name": 5}, "f"]


def test_short_ids() -> None:
    """Templates of Mistral refuse ids of another length."""
    messages = [turn(("toolu_01", "f"), ("a1B2c3D4e", "g")), result("toolu_01"), result("a1B2c3D4e")]
    assert ids(with_ids_of_format(messages, MISTRAL)) == ["call00000", "call00001"] * 2
    messages = [turn(("a1B2c3D4e", "g")), result("a1B2c3D4e")]
    assert with_ids_of_format(messages, MISTRAL) is messages


def test_other_formats_keep_what_came() -> None:
    messages = [turn(("toolu_01", "f")), result("toolu_01")]
    assert with_ids_of_format(messages, HERMES) is messages
    assert with_ids_of_format(messages, ModelFormats()) is messages


def prompt(title: str, *messages: dict[str, Any]) -> str:
    """What the template `title`, which is one of those that write ids, makes of the conversation."""
    form, source = OTHERWISE[title]
    service: Any = SimpleNamespace(
        tokenizer=None, formats=ModelFormats(calls_name=form), chat_template=InlineTemplate(source)
    )
    return asyncio.run(rendered_prompt(service, ChatCompletionRequest(messages=list(messages)), 0))


def test_prompts_have_them() -> None:
    text = prompt("id-for-name", USER, turn(("toolu_01", "f"), ("toolu_02", "g")))
    assert "functions.f:0" in text and "functions.g:1" in text and "toolu" not in text
    assert "call00000" in prompt("short-ids", USER, turn(("call_0123456789abcdef01234567", "f")))
