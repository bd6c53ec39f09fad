"""Events of a model's output, piece by piece: the parsers produce them, and every form of the API consumes them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class TextDelta(NamedTuple):
    """The next piece of the answer's text."""

    text: str


class ReasoningDelta(NamedTuple):
    """The next piece of thoughts."""

    text: str


class CallStart(NamedTuple):
    """The start of a call; its arguments follow. Calls count from 0 within one output."""

    call: int
    name: str


class ArgumentsDelta(NamedTuple):
    """The next piece of the call's arguments, the text of a JSON object."""

    call: int
    text: str


class CallEnd(NamedTuple):
    """The end of a call. `complete`: its arguments are a JSON object. `source`: the call as the model wrote it."""

    call: int
    complete: bool
    source: str


Event = TextDelta | ReasoningDelta | CallStart | ArgumentsDelta | CallEnd


@dataclass(slots=True)
class ToolCall:
    """A whole call."""

    name: str
    arguments: str


@dataclass(slots=True)
class ParsedOutput:
    """A whole output. Calls whose arguments are not a JSON object are part of the text, as the model wrote them."""

    reasoning: str = ""
    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)


def collect(events: Iterable[Event]) -> ParsedOutput:
    """Returns a whole output from its events. A broken call, which a stream has partly sent, is text here."""
    output = ParsedOutput()
    texts: list[str] = []
    reasoning: list[str] = []
    name = ""
    arguments: list[str] = []
    for event in events:
        if isinstance(event, TextDelta):
            texts.append(event.text)
        elif isinstance(event, ReasoningDelta):
            reasoning.append(event.text)
        elif isinstance(event, CallStart):
            name, arguments = event.name, []
        elif isinstance(event, ArgumentsDelta):
            arguments.append(event.text)
        elif event.complete:
            output.calls.append(ToolCall(name, "".join(arguments)))
        else:
            texts.append(event.source)
    output.text, output.reasoning = "".join(texts), "".join(reasoning)
    return output
