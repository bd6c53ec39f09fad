"""Converts messages of the API to the form that chat templates expect.

In the API, arguments of calls are JSON text, and missing values null. Most templates print an object and accept any
text as content; some join the text of arguments to other text, or recognize calls by content none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from sglang.srt.entrypoints.http_errors import bad_request
from sglang.srt.entrypoints.openai.media_parts import media_kind
from sglang.srt.utils.json_nesting import read_json
from sglang.srt.utils.partial_json import longest_object

_PART_SEPARATOR = " "


class CallForm(NamedTuple):
    """The form in which a template expects calls. `text_arguments`: arguments as text, else as an object; `no_content`:
    content none, else "". `broken_text`: it prints arguments that are not JSON as they are."""

    text_arguments: bool = False
    no_content: bool = False
    broken_text: bool = False


def call_form(render: Callable[[list[dict[str, Any]]], str]) -> CallForm:
    """Returns the form with which the template shows a call and least besides. The usual form is tried first, and is
    the result for templates that show no calls."""
    lengths: dict[CallForm, int] = {}
    for form in (CallForm(), CallForm(False, True), CallForm(True, False), CallForm(True, True)):
        text = _shown_call(render, json.dumps(_PROBE_ARGUMENTS), form)
        if _PROBE_VALUE in text and str(_PROBE_ARGUMENTS) not in text:
            lengths[form] = len(text)
    form = min(lengths, key=lambda form: lengths[form], default=CallForm())
    printing = form._replace(broken_text=True)
    return printing if _PROBE_BROKEN in _shown_call(render, _PROBE_BROKEN, printing) else form


def _shown_call(render: Callable[[list[dict[str, Any]]], str], arguments: str, form: CallForm) -> str:
    """Returns a conversation with a call as the template prints it; "" if it refuses."""
    function = {"name": "probe_function", "arguments": arguments}
    call = {"id": "probe0001", "type": "function", "function": function}  # some templates want nine characters
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    try:
        return render([_PROBE_QUESTION, template_message(message, form)])
    except Exception:  # a template is a program
        return ""


_PROBE_VALUE = "probe_value"
_PROBE_ARGUMENTS = {"key": _PROBE_VALUE}
_PROBE_BROKEN = '{"key": "probe'
_PROBE_QUESTION = {"role": "user", "content": "probe question"}


def separates_parts(render: Callable[[list[dict[str, Any]]], str]) -> bool:
    """Returns whether the template writes its own white space between two text parts of a message."""
    try:
        text = render([{"role": "user", "content": [{"type": "text", "text": text} for text in _PROBE_PARTS]}])
    except Exception:  # a template is a program
        return False
    return re.search(r"\s+".join(_PROBE_PARTS), text) is not None


_PROBE_PARTS = ("probe_part", "probe_rest")


def template_message(message: dict[str, Any], form: CallForm, keeps_parts: bool = False) -> dict[str, Any]:
    """Returns a message for a template. Null fields are left out, as templates that use a default for missing ones
    would print "None".

    keeps_parts: the template gets the parts of a text, which it separates itself; otherwise they are joined.
    """
    fields = {name: value for name, value in message.items() if name != "tool_calls" and value is not None}
    if message["role"] == "developer":
        fields["role"] = "system"
    fields["content"] = _template_content(message.get("content") or message.get("refusal"), keeps_parts)
    thoughts = _thoughts(message)
    if thoughts:
        fields["reasoning_content"] = thoughts
    if thoughts and not fields["content"]:
        fields.setdefault("thinking", thoughts)  # the name in Harmony's templates
    if message.get("tool_calls"):
        fields["tool_calls"] = [_tool_call(call, form) for call in message["tool_calls"]]
        if form.no_content and not fields["content"]:
            fields["content"] = None
    return fields


def _thoughts(message: dict[str, Any]) -> str:
    """Returns the thoughts of a message under any of the names that servers use."""
    for name in ("reasoning_content", "reasoning", "thinking"):
        if isinstance(message.get(name), str) and message[name]:
            return str(message[name])
    details = message.get("reasoning_details")
    texts = [detail.get("text") for detail in details if isinstance(detail, dict)] if isinstance(details, list) else []
    return "".join(text for text in texts if isinstance(text, str))


def _template_content(content: str | list[dict[str, Any]] | None, keeps_parts: bool) -> str | list[dict[str, Any]]:
    """Returns text, or with images or videos a list of parts, for each of which templates write a placeholder."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = [_template_part(part) for part in content]
    if any(part["type"] != "text" for part in parts) or (keeps_parts and len(parts) > 1):
        return parts
    return _PART_SEPARATOR.join(part["text"] for part in parts)


def _template_part(part: dict[str, Any]) -> dict[str, Any]:
    kind = media_kind(part)
    if kind is not None:
        return {"type": kind}
    if part["type"] == "refusal" and part.get("refusal"):
        return {"type": "text", "text": part["refusal"]}
    if part["type"] != "text":
        raise bad_request(
            f"message content of type {part['type'][:64]!r} is not supported; send text, image_url or video_url",
            param="messages",
        )
    if part.get("text") is None:
        raise bad_request('a content part of type "text" has no "text"', param="messages")
    return {"type": "text", "text": part["text"]}


def _tool_call(call: dict[str, Any], form: CallForm) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request('each entry of tool_calls needs {"function": {"name", "arguments"}}', param="messages")
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"), form)}}


def _arguments(given: Any, form: CallForm) -> Any:
    """Returns arguments as the template expects them. History is only read: a call that the model wrote wrongly, or
    that was cut by a token limit, must not end the conversation. The template prints its text, or gets the readable
    part of the object."""
    if isinstance(given, dict) and not form.text_arguments:
        return given
    if not isinstance(given, str):
        given = json.dumps({} if given is None else given, ensure_ascii=False)
    value = _value(given)
    if not isinstance(value, dict):
        if form.broken_text:
            return given if form.text_arguments or value is _NO_JSON else value
        value = longest_object(given)
        given = json.dumps(value, ensure_ascii=False)
    if not form.text_arguments:
        return value
    return given if value else "{}"


_NO_JSON = object()


def _value(arguments: str) -> Any:
    """Returns the value of JSON text; _NO_JSON for other text. Empty text and null count as an empty object."""
    try:
        value = read_json(arguments or "null")
    except ValueError:
        return _NO_JSON
    return {} if value is None else value
