"""Parses one output of a model from text to events.

    parser = OutputParser(calls=TOOL_CALL_FORMATS["glm45"], tools={"weather": {...schema...}})
    for text in pieces:
        events = parser.push(text)
    events = parser.finish()

With adjacent events of the same kind joined, the events do not depend on how the output was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.function_call.call_format import CallFormat
from sglang.srt.function_call.events import Event, ParsedOutput, collect
from sglang.srt.function_call.messages import MessageFormat, Start
from sglang.srt.function_call.output import Output
from sglang.srt.function_call.reader import Reader, Steps
from sglang.srt.function_call.reasoning import ReasoningFormat


class OutputParser:
    """calls: how the model calls functions, None to leave calls in the text; so does an empty `tools`.
    tools: name -> JSON schema of the parameters.
    reasoning: how it writes thoughts; None: it has none.
    inside: whether the prompt ends within thoughts.
    start: where in a message the output begins, for formats of messages.
    separate: thoughts are events of their own; else they stay in the text as they are.
    whole_thoughts: thoughts are one event when they have ended.
    """

    def __init__(
        self,
        *,
        calls: CallFormat | MessageFormat | None = None,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        reasoning: ReasoningFormat | MessageFormat | None = None,
        inside: bool = False,
        start: Start = Start.HEADER,
        separate: bool = True,
        whole_thoughts: bool = False,
    ) -> None:
        self._calls = calls
        self._reasoning = reasoning
        self._inside = inside
        self._start = start
        self._separate = separate
        self._reader = Reader()
        self._output = Output(self._reader, tools or {}, whole_thoughts)
        self._steps = self._read()
        next(self._steps)

    @property
    def in_reasoning(self) -> bool:
        """Returns whether the text so far ends within thoughts."""
        return self._output.in_reasoning

    @property
    def num_held(self) -> int:
        """Returns the characters whose events are still to come, all of them perhaps with the next piece. Those of a
        call that has begun are not among them: its arguments are passed on."""
        return self._reader.num_held(skipped=int(self._output.in_call))

    @property
    def reasoning_end(self) -> int:
        """Returns the characters up to the end of the last complete thoughts; 0: there were none."""
        return self._output.reasoning_end

    def push(self, text: str) -> list[Event]:
        """Adds the next piece of the output; returns the events that have become certain."""
        self._reader.feed(text)
        next(self._steps)
        return self._output.take_events()

    def finish(self) -> list[Event]:
        """Returns the remaining events at the end of the output."""
        self._reader.end()
        next(self._steps, None)
        return self._output.take_events()

    def _read(self) -> Steps[None]:
        reader, output = self._reader, self._output
        yield
        messages = next((form for form in (self._calls, self._reasoning) if isinstance(form, MessageFormat)), None)
        if messages is not None:
            separate = self._separate and isinstance(self._reasoning, MessageFormat)
            yield from messages.read(reader, output, separate, self._start)
        else:
            calls = self._calls if output.tools and isinstance(self._calls, CallFormat) else None
            reasoning = self._reasoning if isinstance(self._reasoning, ReasoningFormat) else None
            end_of_thoughts = ""
            if reasoning is not None and (
                yield from reasoning.read(reader, output, self._inside, self._separate, calls)
            ):
                end_of_thoughts = reasoning.end
            if calls is not None:
                yield from calls.read(reader, output, end_of_thoughts)
            else:
                output.flush_space()
                yield from reader.rest(output.exact_text)
        output.flush_space()


def parse(parser: OutputParser, text: str) -> ParsedOutput:
    """Returns the events of a whole output."""
    return collect([*parser.push(text), *parser.finish()])
