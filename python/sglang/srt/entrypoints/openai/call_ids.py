"""Renumbers the ids of calls in a conversation in the form that the model's format has.

Some models know call ids of one form, and imitate those that they read: after a conversation with other ids their next
call would be text. Some templates refuse other ids.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

from sglang.srt.function_call.model_formats import ModelFormats


def with_ids_of_format(messages: list[dict[str, Any]], formats: ModelFormats) -> list[dict[str, Any]]:
    """Returns the conversation with calls numbered from its beginning, and results renumbered alike. Returns it
    unchanged if all ids have the format's form."""
    calls = [call for message in messages if message["role"] == "assistant" for call in message.get("tool_calls") or ()]
    if all(formats.has_id(call.get("id"), _name(call), number) for number, call in enumerate(calls)):
        return messages
    counter = _Counter(formats)
    return [counter.counted(message) for message in messages]


class _Counter:
    def __init__(self, formats: ModelFormats) -> None:
        self._formats = formats
        self._num_calls = 0
        self._new_ids: dict[Any, deque[str]] = {}
        """Earlier id -> the ids of the calls of the last message that had it, those without a result first."""

    def counted(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["role"] == "assistant" and message.get("tool_calls"):
            return {**message, "tool_calls": self._calls(message["tool_calls"])}
        new_ids = self._new_ids.get(_key(message.get("tool_call_id"))) if message["role"] == "tool" else None
        if new_ids is None:
            return message
        return {**message, "tool_call_id": new_ids.popleft() if len(new_ids) > 1 else new_ids[0]}

    def _calls(self, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
        new_ids: defaultdict[Any, deque[str]] = defaultdict(deque)
        counted = []
        for call in calls:
            new_id = self._formats.counted_id(_name(call), self._num_calls)
            self._num_calls += 1
            new_ids[_key(call.get("id"))].append(new_id)
            counted.append({**call, "id": new_id})
        self._new_ids |= new_ids
        return counted


def _name(call: dict[str, Any]) -> str:
    """Returns the function's name; "" if there is none, which the template's form of the call refuses."""
    function = call.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def _key(call_id: Any) -> str | None:
    return call_id if isinstance(call_id, str) else None
