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
from sglang.srt.utils.partial_json import longest_object

_PART_SEPARATOR = " "


class CallForm(NamedTuple):
    """The form in which a template takes calls: `text_arguments`, else an object; `no_content` where there is none,
    else "". `broken_text`: it prints arguments that are no JSON as they are."""

    text_arguments: bool = False
    no_content: bool = False
    broken_text: bool = False


def call_form(render: Callable[[list[dict[str, Any]]], str]) -> CallForm:
    """The form in which the template shows a call and the least beside it. The usual one comes first, and holds for
    templates that show no calls."""
    lengths: dict[CallForm, int] = {}
    for form in (CallForm(), CallForm(False, True), CallForm(True, False), CallForm(True, True)):
        text = _shown_call(render, json.dumps(_PROBE_ARGUMENTS), form)
        if _PROBE_VALUE in text and str(_PROBE_ARGUMENTS) not in text:
            lengths[form] = len(text)
    form = min(lengths, key=lambda form: lengths[form], default=CallForm())
    printing = form._replace(broken_text=True)
    return printing if _PROBE_BROKEN in _shown_call(render, _PROBE_BROKEN, printing) else form


def _shown_call(render: Callable[[list[dict[str, Any]]], str], arguments: str, form: CallForm) -> str:
    """A conversation with a call as the template prints it; "" if it does not take that."""
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
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"), form)}}


def _arguments(given: Any, form: CallForm) -> Any:
    """Arguments as the template takes them. Those of history are there to be read, not to be run: a call that the model
    wrote wrongly, or that its limit of tokens cut, ends no conversation. The template prints its text, or gets as much
    of it as is an object."""
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
    """The value of JSON; _NO_JSON for another text. Nothing, and null, are an object without entries."""
    try:
        value = read_json(arguments or "null")
    except ValueError:
        return _NO_JSON
    return {} if value is None else value
