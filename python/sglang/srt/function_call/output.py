"""Collects the events that grammars report, and applies the rules that all formats share.

A call begins when its name is one of the request's tools and its arguments open. A beginning that does not get so far
is text, markers included. After that it is a call, whatever follows: its arguments are passed on as they come. White
space next to a call belongs to the format, not to the text.
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
from sglang.srt.function_call.known_schemas import KnownSchemas
from sglang.srt.function_call.reader import Reader, Sink

MAX_HEADER = 512
"""Characters between the marker of a call, or of a parameter, and what follows its name."""


class NotACall(Exception):
    """Raised when the text does not fit the format. Ends the attempt, not the parsing."""


class SkippedCall(NotACall):
    """Raised after a complete call that this request cannot run: the function is not offered, or its arguments are not
    an object."""


class SpaceHold:
    """Passes text on, holding white space back until other text follows."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._space: list[str] = []

    def push(self, text: str) -> None:
        """Passes on `text` and the white space held before it; holds white space at its end."""
        length = len(text.rstrip())
        if length:
            self._sink(self.take() + text[:length])
        if length < len(text):
            self._space.append(text[length:])

    def take(self) -> str:
        """Returns the held white space and forgets it."""
        space, self._space = "".join(self._space), []
        return space


class Output:
    """The events of one output.

    tools: name -> JSON schema of the parameters, empty where there is none.
    whole_thoughts: thoughts are one event, when they have ended.
    """

    def __init__(self, reader: Reader, tools: Mapping[str, Mapping[str, Any]], whole_thoughts: bool = False) -> None:
        self.tools = tools
        self.schemas = KnownSchemas()
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
        """Returns the new events; adjacent events of the same kind are joined."""
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
        """Adds text. White space waits until it is known whether a call follows."""
        self._space.push(text)

    def exact_text(self, text: str) -> None:
        """Adds text of the answer as it is, white space too."""
        if text:
            self.text_since_call = True
            self._add(TextDelta, text)

    def reasoning(self, text: str) -> None:
        """Adds text of thoughts."""
        if text:
            self._add(ReasoningDelta, text)

    def drop_space(self) -> None:
        """Drops the white space just read, which belongs to the format."""
        self._space.take()

    def begin_reasoning(self, sink: Sink | None) -> None:
        """Begins thoughts. `sink` takes text within them that looks like a call but is none."""
        self.in_reasoning = True
        self._thoughts = sink

    def end_reasoning(self, length: int = 0) -> None:
        """Ends thoughts. length: characters read since their end."""
        self.in_reasoning = False
        self._thoughts = None
        self.reasoning_end = self._reader.offset - length

    def flush_space(self) -> None:
        """Notes that no call follows. White space after a last call is dropped."""
        space = self._space.take()
        if self.text_since_call:
            self.exact_text(space)

    # --- calls --------------------------------------------------------------------------------------------------------

    @property
    def in_call(self) -> bool:
        """Returns whether a call has begun and not ended."""
        return self._call is not None

    def start_call(self, name: str) -> None:
        """Begins a call. Raises NotACall for a function that the request does not offer."""
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
        """Adds text to the arguments of the current call."""
        assert self._call is not None
        if text:
            self._call.append(text)
            self._add(self._arguments_delta, text)

    def _arguments_delta(self, text: str) -> Event:
        return ArgumentsDelta(self.num_calls, text)

    def succeed(self) -> None:
        """Accepts the text since the mark: it is a call, or markup without content."""
        source = self._reader.since_mark()
        self._reader.unmark()
        if self._call is not None:
            self._end_call(source)

    def fail(self) -> None:
        """Rejects the text since the mark: it is a call if one has begun, else text or a thought."""
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
