"""A conversation as chat templates read it.

The API carries the arguments of calls as JSON text, and null for what is not there. Most templates print an object and
take any content as text; some join the text of arguments to other text, or know calls by a content that is none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from sglang.srt.entrypoints.http_errors import bad_request
from sglang.srt.entrypoints.openai.media_parts import media_kind
from sglang.srt.utils.json_nesting import read_json

_PART_SEPARATOR = " "


class CallForm(NamedTuple):
    """The form in which a template takes calls: `text_arguments`, else an object; `no_content` where there is none,
    else ""."""

    text_arguments: bool = False
    no_content: bool = False


def call_form(render: Callable[[list[dict[str, Any]]], str]) -> CallForm:
    """The form in which the template shows a call and the least beside it. The usual one comes first, and holds for
    templates that show no calls."""
    lengths: dict[CallForm, int] = {}
    for form in (CallForm(), CallForm(False, True), CallForm(True, False), CallForm(True, True)):
        try:
            text = render([_PROBE_QUESTION, template_message(_PROBE_CALL, form)])
        except Exception:  # a template is a program
            continue
        if _PROBE_VALUE in text and str(_PROBE_ARGUMENTS) not in text:
            lengths[form] = len(text)
    return min(lengths, key=lambda form: lengths[form], default=CallForm())


_PROBE_VALUE = "probe_value"
_PROBE_ARGUMENTS = {"key": _PROBE_VALUE}
_PROBE_QUESTION = {"role": "user", "content": "probe question"}
_PROBE_CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "probe0001",  # some templates want nine characters
            "type": "function",
            "function": {"name": "probe_function", "arguments": json.dumps(_PROBE_ARGUMENTS)},
        }
    ],
}


def separates_parts(render: Callable[[list[dict[str, Any]]], str]) -> bool:
    """Whether the template writes white space of its own between two parts of a message's text."""
    try:
        text = render([{"role": "user", "content": [{"type": "text", "text": text} for text in _PROBE_PARTS]}])
    except Exception:  # a template is a program
        return False
    return re.search(r"\s+".join(_PROBE_PARTS), text) is not None


_PROBE_PARTS = ("probe_part", "probe_rest")


def template_message(message: dict[str, Any], form: CallForm, keeps_parts: bool = False) -> dict[str, Any]:
    """Fields that are null are left out, as templates that ask for them with a default would print "None".

    keeps_parts: the parts of a text reach the template, which separates them itself; else they are joined."""
    fields = {name: value for name, value in message.items() if name != "tool_calls" and value is not None}
    if message["role"] == "developer":
        fields["role"] = "system"
    fields["content"] = _template_content(message.get("content") or message.get("refusal"), keeps_parts)
    thoughts = _thoughts(message)
    if thoughts:
        fields["reasoning_content"] = thoughts
    if thoughts and not fields["content"]:
        fields.setdefault("thinking", thoughts)  # its name in templates of Harmony
    if message.get("tool_calls"):
        fields["tool_calls"] = [_tool_call(call, form) for call in message["tool_calls"]]
        if form.no_content and not fields["content"]:
            fields["content"] = None
    return fields


def _thoughts(message: dict[str, Any]) -> str:
    """The thoughts of a message by any of the names that servers give them."""
    for name in ("reasoning_content", "reasoning", "thinking"):
        if isinstance(message.get(name), str) and message[name]:
            return str(message[name])
    details = message.get("reasoning_details")
    texts = [detail.get("text") for detail in details if isinstance(detail, dict)] if isinstance(details, list) else []
    return "".join(text for text in texts if isinstance(text, str))


def _template_content(content: str | list[dict[str, Any]] | None, keeps_parts: bool) -> str | list[dict[str, Any]]:
    """Text, or with images or videos a list of parts, of which templates write a placeholder each."""
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
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        text = arguments or "{}"
        arguments = _decoded(text)
        if form.text_arguments and arguments is not None:
            return {**call, "function": {**function, "arguments": text}}
    arguments = {} if arguments is None else arguments
    if form.text_arguments:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _decoded(arguments: str) -> Any:
    try:
        return read_json(arguments)
    except ValueError as error:
        raise bad_request(f"tool_calls: arguments are {error}", param="messages") from error
