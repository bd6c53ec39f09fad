"""Collects the events that a grammar reports, and keeps the rules that all formats share.

A call begins when its name is one of the request's tools and its arguments open. What looks like a call and does not
come that far is text, markers and all. From there on it is a call, whatever follows: its arguments are passed on as
they come. White space next to a call belongs to the format, not to the text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from sglang.srt.function_call.events import (
    ArgumentsDelta,
    CallEnd,
    CallStart,
    Event,
    ReasoningDelta,
    TextDelta,
)
from sglang.srt.function_call.reader import Reader, Sink

MAX_HEADER = 512
"""Characters between the marker of a call, or of a parameter, and what follows its name."""


class NotACall(Exception):
    """The text at the reading position does not fit the format. Ends the attempt, not the parsing."""


class SkippedCall(NotACall):
    """A call that was read to its end, and that this request cannot run: of a function that it does not offer, or with
    arguments that are no object."""


class SpaceHold:
    """Passes text on, but white space only when something else follows it."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._space: list[str] = []

    def push(self, text: str) -> None:
        length = len(text.rstrip())
        if length:
            self._sink(self.take() + text[:length])
        if length < len(text):
            self._space.append(text[length:])

    def take(self) -> str:
        """The white space that waits, which is then forgotten."""
        space, self._space = "".join(self._space), []
        return space


class Output:
    """The events of one output.

    tools: name -> JSON schema of the parameters, empty where there is none.
    whole_thoughts: thoughts are one event, when they have ended.
    """

    def __init__(self, reader: Reader, tools: Mapping[str, Mapping[str, Any]], whole_thoughts: bool = False) -> None:
        self.tools = tools
        self.num_calls = 0
        self.in_reasoning = False
        self.reasoning_end = 0
        """Characters of the output up to the end of the last thoughts that have ended."""
        self._whole_thoughts = whole_thoughts
        self._events: list[Event] = []
        self._delta: Callable[[str], Event] | None = None
        self._pieces: list[str] = []
        self._reader = reader
        self._space = SpaceHold(self.exact_text)
        self.text_since_call = True
        self._thoughts: Sink | None = None
        self._call: list[str] | None = None
        self._space_before_call = ""

    def take_events(self) -> list[Event]:
        """Return the new events; neighbours of the same kind are one event."""
        if not (self._whole_thoughts and self.in_reasoning):
            self._join_pieces()
        events, self._events = self._events, []
        return events

    def _add(self, delta: Callable[[str], Event], text: str) -> None:
        if delta != self._delta:
            self._join_pieces()
            self._delta = delta
        self._pieces.append(text)

    def _join_pieces(self) -> None:
        if self._delta is not None:
            self._events.append(self._delta("".join(self._pieces)))
        self._delta, self._pieces = None, []

    # --- text ---------------------------------------------------------------------------------------------------------

    def text(self, text: str) -> None:
        """White space waits until it is known whether a call follows."""
        self._space.push(text)

    def exact_text(self, text: str) -> None:
        if text:
            self.text_since_call = True
            self._add(TextDelta, text)

    def reasoning(self, text: str) -> None:
        if text:
            self._add(ReasoningDelta, text)

    def drop_space(self) -> None:
        """The white space just read belongs to the format."""
        self._space.take()

    def begin_reasoning(self, sink: Sink | None) -> None:
        """`sink` takes what looks like a call within the thoughts and is none."""
        self.in_reasoning = True
        self._thoughts = sink

    def end_reasoning(self, length: int = 0) -> None:
        """length: characters read since the end of the thoughts."""
        self.in_reasoning = False
        self._thoughts = None
        self.reasoning_end = self._reader.offset - length

    def flush_space(self) -> None:
        """No call follows. White space after the last one is dropped."""
        space = self._space.take()
        if self.text_since_call:
            self.exact_text(space)

    # --- calls --------------------------------------------------------------------------------------------------------

    @property
    def in_call(self) -> bool:
        return self._call is not None

    def start_call(self, name: str) -> None:
        """Raises NotACall for a function that the request does not offer."""
        if name not in self.tools:
            raise NotACall
        if self.in_reasoning:
            self.end_reasoning(len(self._reader.since_mark()))
            self._reader.lift_fence()
        self._space_before_call = self._space.take()
        self._call = []
        self._join_pieces()
        self._events.append(CallStart(self.num_calls, name))

    def arguments(self, text: str) -> None:
        assert self._call is not None
        if text:
            self._call.append(text)
            self._add(self._arguments_delta, text)

    def _arguments_delta(self, text: str) -> Event:
        return ArgumentsDelta(self.num_calls, text)

    def succeed(self) -> None:
        """Accept the text since the mark: it is a call, or markup without content."""
        source = self._reader.since_mark()
        self._reader.unmark()
        if self._call is not None:
            self._end_call(source)

    def fail(self) -> None:
        """Reject the text since the mark: it is a call if one has begun, else text, or a thought."""
        source = self._reader.since_mark()
        self._reader.unmark()
        if self._call is not None:
            self._end_call(source)
        else:
            (self._thoughts or self.text)(source)

    def _end_call(self, source: str) -> None:
        assert self._call is not None
        self._join_pieces()
        complete = is_object("".join(self._call))
        self._events.append(CallEnd(self.num_calls, complete, self._space_before_call + source))
        self.num_calls += 1
        self._call = None
        self.text_since_call = False


def is_object(text: str) -> bool:
    """Returns whether `text` is a JSON object."""
    return is_container(text) and text.lstrip().startswith("{")


def is_container(text: str) -> bool:
    """Returns whether `text` is a JSON object or array."""
    try:
        return isinstance(msgspec.json.decode(text), dict | list)
    except (msgspec.DecodeError, RecursionError):
        return False
