"""Whether an answer is right: equal to the expected text, the same JSON value, or the same tool calls."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

_THOUGHT = re.compile(r"^\s*<think>.*?</think>\s*", re.DOTALL)
_QWEN_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Verdict:
    right: bool
    valid: bool
    """Whether it has the asked form, right or wrong. Texts always have."""
    got: str


def without_thought(text: str) -> str:
    """A server that splits off thoughts has done so already."""
    return _THOUGHT.sub("", text).strip()


def judge(item: dict[str, Any], choice: dict[str, Any]) -> Verdict:
    """`item` as written by `lab/tiny_model heldout`; `choice` of a chat or a text completion."""
    if "message" not in choice:
        return _text(item["expected"], str(choice.get("text") or "").strip())
    message = choice["message"]
    content = without_thought(str(message.get("content") or ""))
    if item["check"] == "tool":
        return _tools(item, message.get("tool_calls") or [], content)
    if item["check"] == "json":
        return _json(item["expected"], content)
    return _text(item["expected"], content)


def _text(expected: str, got: str) -> Verdict:
    return Verdict(got == expected, True, got)


def _json(expected: str, got: str) -> Verdict:
    try:
        value = json.loads(got)
    except ValueError:
        return Verdict(False, False, got)
    return Verdict(same(value, json.loads(expected)), True, got)


def _tools(item: dict[str, Any], parsed: list[dict[str, Any]], content: str) -> Verdict:
    """Calls that the server has parsed; without a parser, the text is the call."""
    if parsed:
        return _parsed_calls(item["calls"], parsed)
    if item["chat_template_kwargs"].get("tool_format", "qwen") != "qwen":
        return Verdict(content == item["expected"], content == item["expected"], content)
    try:
        calls = [json.loads(text) for text in _QWEN_CALL.findall(content)]
    except ValueError:
        return Verdict(False, False, content)
    clean = not _QWEN_CALL.sub("", content).strip()
    return Verdict(clean and same(calls, item["calls"]), bool(calls), content)


def _parsed_calls(wanted: list[dict[str, Any]], parsed: list[dict[str, Any]]) -> Verdict:
    shown = json.dumps([call.get("function") for call in parsed], ensure_ascii=False)
    try:
        calls = [
            {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])}
            for call in parsed
        ]
    except (KeyError, TypeError, ValueError):
        return Verdict(False, False, shown)
    return Verdict(same(calls, wanted), True, shown)


def same(a: Any, b: Any) -> bool:
    """Equal values of equal types: 1 is not true, and not 1.0."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)
