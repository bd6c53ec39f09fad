"""Formats in which an output is a row of messages, each with a header that gives its kind and recipient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum, auto

from sglang.srt.function_call.output import Output
from sglang.srt.function_call.reader import Markers, Reader, Steps

_BETWEEN_THOUGHTS = "\n"


class Start(Enum):
    """Where an output begins: at a message's header, or in a body that the prompt has begun."""

    HEADER = auto()
    TEXT = auto()
    THOUGHTS = auto()


class MessageFormat(ABC):
    """A format of messages, for both calls and thoughts. `markers`: texts that the parser must see; `thought_marks`:
    marks of thoughts; `next_message`: text between the end of a message and the next header; `answer_header`: header of
    the answer."""

    markers: tuple[str, ...]
    thought_marks: tuple[str, str]
    next_message: str
    answer_header: str

    @property
    def after_body(self) -> str:
        """Returns the text between a body and the next header."""
        return self.thought_marks[1] + self.next_message

    def start_behind(self, prompt: str) -> Start:
        """Returns where an output begins that continues the last message of `prompt`."""
        begin, end = self.thought_marks
        if prompt.rstrip().endswith((end, self.next_message)):
            return Start.HEADER
        last = max(prompt.rfind(mark) for mark in (end, self.next_message, self.answer_header))
        return Start.THOUGHTS if prompt.rfind(begin) > last else Start.TEXT

    @abstractmethod
    def read(self, reader: Reader, output: Output, separate: bool, start: Start) -> Steps[None]:
        """Reads a whole output. separate: thoughts are kept apart from the text."""


class Bodies:
    """Reads bodies of messages that are not calls. `ends`: markers that end one; `edges`: these, and those that begin
    the next message."""

    def __init__(self, reader: Reader, output: Output, separate: bool, ends: Markers, edges: Markers) -> None:
        self._reader, self._output, self._separate = reader, output, separate
        self._ends, self._edges = ends, edges
        self._num_thoughts = 0

    def read(self, is_thought: bool) -> Steps[None]:
        """Reads a body up to its end."""
        reader, output = self._reader, self._output
        output.in_reasoning = is_thought
        if is_thought and self._separate:
            output.reasoning(_BETWEEN_THOUGHTS if self._num_thoughts else "")
            self._num_thoughts += 1
            yield from reader.until(self._edges, output.reasoning)
        else:
            yield from reader.until(self._edges, output.text)
        yield from reader.take_marker(self._ends)
        if is_thought:
            output.end_reasoning()
