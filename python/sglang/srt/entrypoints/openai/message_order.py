"""Reorders conversations so that the model's chat template accepts them.

Agents send instructions among the messages, adjacent messages of one role, and user text after a tool result. Many
templates print all of that. Others refuse a system message that is not the first, or any, or turns that do not
alternate; for them these texts are moved to where they are accepted, and none is dropped. Some refuse results without
the function's name, which OpenAI's API does not send; for them the call's name is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

Message = dict[str, Any]
Content = str | list[dict[str, Any]] | None
Render = Callable[[list[Message]], str]

SYSTEM_ROLES = ("system", "developer")
_GAP = "\n\n"
_REMINDER = ("<system-reminder>\n", "\n</system-reminder>")
"""Marks around a reminder in the user's text: those of Claude Code, which models for agents know."""


class MessageRules(NamedTuple):
    """What a template accepts: system messages at the beginning, and elsewhere; `refused` pairs of roles must not
    follow one another; `named_results` alone, which have the function's name."""

    system: bool = True
    later_system: bool = True
    refused: frozenset[tuple[str, str]] = frozenset()
    named_results: bool = False

    def __str__(self) -> str:
        """Describes what is moved or added."""
        system = "first only" if self.system else "in the text of the first user"
        pairs = ", ".join(f"{second} behind {first}" for first, second in sorted(self.refused))
        moved = [] if self.later_system else [f"system messages {system}"]
        named = ["results with the function's name"] if self.named_results else []
        return "; ".join(moved + ([f"joined: {pairs}"] if pairs else []) + named)


def _probe(role: str, name: str) -> Message:
    return {"role": role, "content": f"probe_{name}"}


_SYSTEM, _LATER = _probe("system", "system"), _probe("system", "later")
_QUESTION, _NEXT = _probe("user", "question"), _probe("user", "next")
_ANSWER, _MORE = _probe("assistant", "answer"), _probe("assistant", "more")
_CALL_ID = "probe0001"  # some templates require nine characters
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": _CALL_ID, "type": "function", "function": {"name": "probe_function", "arguments": "{}"}}],
}
_NAMELESS = {**_probe("tool", "result"), "tool_call_id": _CALL_ID}
_RESULT = {**_NAMELESS, "name": "probe_function"}
_LATER_PLACES = (
    [_SYSTEM, _LATER, _QUESTION],
    [_SYSTEM, _QUESTION, _LATER],
    [_SYSTEM, _QUESTION, _ANSWER, _LATER, _NEXT],
    [_SYSTEM, _QUESTION, _CALL, _RESULT, _LATER],
)


def message_rules(render: Render) -> MessageRules:
    """Finds out what a template accepts by rendering probes. One that shows no conversation at all gets no
    restrictions."""
    if not _template_prints(render, [_QUESTION, _ANSWER, _NEXT]):
        return MessageRules()
    takes_system = _template_prints(render, [_SYSTEM, _QUESTION])
    takes_later = takes_system and not any(
        _template_prints(render, [message for message in messages if message is not _LATER])
        and not _template_prints(render, messages)
        for messages in _LATER_PLACES
    )
    takes_results, takes_nameless = (
        _template_prints(render, [_QUESTION, _CALL, result]) for result in (_RESULT, _NAMELESS)
    )
    named_results = takes_results and not takes_nameless
    return MessageRules(takes_system, takes_later, frozenset(_refused_pairs(render)), named_results)


def _refused_pairs(render: Render) -> Iterator[tuple[str, str]]:
    if not _template_prints(render, [_QUESTION, _NEXT]):
        yield "user", "user"
    if not _template_prints(render, [_QUESTION, _ANSWER, _MORE, _NEXT]):
        yield "assistant", "assistant"
    if _template_prints(render, [_QUESTION, _CALL, _RESULT]) and not _template_prints(
        render, [_QUESTION, _CALL, _RESULT, _NEXT]
    ):
        yield "tool", "user"


def _template_prints(render: Render, messages: list[Message]) -> bool:
    """Returns whether the template takes these messages and prints the text of each."""
    try:
        text = render(messages)
    except Exception:  # a template is a program
        return False
    return all(message["content"] in text for message in messages)


def with_names(messages: list[Message]) -> list[Message]:
    """Returns the conversation, whose calls have names, with the name of its call in each result that has none."""
    names: dict[str, str] = {}
    named = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            if isinstance(call.get("id"), str):
                names[call["id"]] = call["function"]["name"]
        lacks_name = message["role"] == "tool" and not message.get("name")
        name = names.get(message.get("tool_call_id", "")) if lacks_name else None
        named.append(message if name is None else {**message, "name": name})
    return named


def fitted_messages(messages: list[Message], rules: MessageRules, in_place: bool = False) -> list[Message]:
    """Returns the conversation in an order that these rules allow; the same list if that changes nothing.

    System messages that are not accepted in place go into the first one; with `in_place`, into the neighbouring user
    text or result as reminders, so that the preceding tokens stay cached.
    """
    if not rules.later_system and any(message["role"] in SYSTEM_ROLES for message in messages):
        messages = _with_reminders(messages) if in_place else _with_system_first(messages)
    if not rules.system and messages[0]["role"] in SYSTEM_ROLES:
        messages = _without_system(messages)
    return _with_turns(messages, rules.refused) if rules.refused else messages


def _with_system_first(messages: list[Message]) -> list[Message]:
    instructions = [message for message in messages if message["role"] in SYSTEM_ROLES]
    return [_joined(instructions), *(message for message in messages if message["role"] not in SYSTEM_ROLES)]


def _with_reminders(messages: list[Message]) -> list[Message]:
    """Joins system messages at the beginning; moves others into the preceding or following user text or result."""
    num_first = next((i for i, each in enumerate(messages) if each["role"] not in SYSTEM_ROLES), len(messages))
    groups = [messages[:num_first]] if num_first else []
    waiting: list[Message] = []
    for message in messages[num_first:]:
        is_answer = message["role"] == "assistant"
        if message["role"] in SYSTEM_ROLES:
            reminder = _reminder(message)
            if groups and groups[-1][-1]["role"] != "assistant":
                groups[-1].append(reminder)
            else:
                waiting.append(reminder)
            continue
        if waiting and is_answer:
            groups.append(waiting)
            waiting = []
        groups.append([*waiting, message])
        waiting = []
    if waiting:
        groups.append(waiting)
    return [_joined(group) for group in groups]


def _reminder(message: Message) -> Message:
    begin, end = _REMINDER
    content = message.get("content")
    if isinstance(content, list):
        return {"role": "user", "content": [_text_part(begin), *content, _text_part(end)]}
    return {"role": "user", "content": f"{begin}{content or ''}{end}"}


def _without_system(messages: list[Message]) -> list[Message]:
    """Moves the system message to the beginning of the first user's text."""
    first, rest = messages[0], messages[1:]
    at = next((i for i, message in enumerate(rest) if message["role"] == "user"), None)
    if at is None or any(message["role"] == "assistant" for message in rest[:at]):
        return [{"role": "user", "content": first.get("content")}, *rest]
    return [*rest[:at], _joined([{**first, "role": "user"}, rest[at]]), *rest[at + 1 :]]


def _with_turns(messages: list[Message], refused: frozenset[tuple[str, str]]) -> list[Message]:
    """Joins adjacent messages of which the template refuses the second after the first."""
    groups: list[list[Message]] = []
    for message in messages:
        role = message["role"]
        before = groups[-1][0]["role"] if groups else ""
        if (before, role) in refused and not (before == "tool" and _has_media(message)):
            groups[-1].append(message)
        else:
            groups.append([message])
    return [_joined(group) for group in groups]


def _has_media(message: Message) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(part.get("type") != "text" for part in content)


def _joined(group: list[Message]) -> Message:
    """Returns one message with the content of all in the group. Its role and further fields are those of the message
    that templates know best: a result before a user's text."""
    if len(group) == 1:
        return group[0]
    head = next((message for message in group if message["role"] != "user"), group[0])
    joined = {**head, "content": _joined_content(message.get("content") for message in group)}
    thoughts = [message["reasoning_content"] for message in group if message.get("reasoning_content")]
    if thoughts:
        joined["reasoning_content"] = _GAP.join(thoughts)
    calls = [call for message in group for call in message.get("tool_calls") or ()]
    if calls:
        joined["tool_calls"] = calls
    return joined


def _joined_content(contents: Iterable[Content]) -> Content:
    given = [content for content in contents if content]
    texts = [content for content in given if isinstance(content, str)]
    if len(texts) == len(given):
        return _GAP.join(texts)
    return [part for content in given for part in ([_text_part(content)] if isinstance(content, str) else content)]


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
