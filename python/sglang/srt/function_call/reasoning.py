"""The thoughts before an answer."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.function_call.call_format import CallFormat
from sglang.srt.function_call.output import Output, SpaceHold
from sglang.srt.function_call.reader import Markers, Reader, Sink, Steps


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """Thoughts between `begin` and `end`. `inside`: the prompt ends within them, unless it shows otherwise.

    `calls_end`: a call that is certain ends the thoughts as well. `in_text`: thoughts stay in the text, with `begin` in
    front also where the prompt has it, so that clients can send them back. `lone_end`: an answer without thoughts may
    begin with `end`.
    """

    begin: str = "<think>"
    end: str = "</think>"
    inside: bool = False
    calls_end: bool = False
    in_text: bool = False
    lone_end: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.begin, self.end)

    @property
    def around_thoughts(self) -> tuple[str, str]:
        return (self.begin, self.end)

    def starts_inside(self, prompt: str) -> bool:
        """Returns whether an output that follows `prompt` begins with thoughts."""
        prompt = prompt.rstrip()
        if prompt.endswith(self.begin):
            return True
        return self.inside and not prompt.endswith(self.end)

    def last_mark(self, text: str) -> str:
        """The mark behind which an answer that has begun with `text` goes on; `end` where there is none: such an answer
        is no thought."""
        return self.begin if text.rfind(self.begin) > text.rfind(self.end) else self.end

    def read(
        self, reader: Reader, output: Output, inside: bool, separate: bool = True, calls: CallFormat | None = None
    ) -> Steps[None]:
        """The thoughts, if there are any. White space next to their marks belongs to the format.

        separate: False leaves them in the text, marks and all. calls: how a call may begin within them.
        """
        reader.mark()
        yield from reader.space()
        begun = (yield from reader.one_of(Markers(self.begin))) is not None
        opening = reader.since_mark()
        reader.unmark()
        if not (begun or inside):
            output.text(opening)
            if self.lone_end and separate and (yield from reader.one_of(Markers(self.end))) is not None:
                output.drop_space()
                yield from reader.space()
            return
        separate = separate and not self.in_text
        if separate:
            yield from reader.space()
        elif self.in_text and not begun:
            output.exact_text(self.begin + opening)
        else:
            output.exact_text(opening)
        sink = SpaceHold(output.reasoning).push if separate else output.exact_text
        output.begin_reasoning(sink)
        end = yield from self._thoughts(reader, output, sink, calls if self.calls_end else None)
        if not output.in_reasoning:  # a call has ended them
            return
        if end is not None:
            reader.skip(len(end))
            if not separate:
                output.exact_text(end)
        output.end_reasoning()
        if end is not None and separate:
            yield from reader.space()

    def _thoughts(self, reader: Reader, output: Output, sink: Sink, calls: CallFormat | None) -> Steps[str | None]:
        """Passes them on, up to their end mark, which is returned and stays, to a call, or to the end of the text."""
        markers = Markers(self.end, *(calls.opening if calls is not None else ()))
        while True:
            marker = yield from reader.until(markers, sink)
            if marker is None or marker == self.end:
                return marker
            assert calls is not None
            reader.fence(Markers(self.end))
            yield from calls.read_marker(reader, output, marker)
            reader.lift_fence()
            if not output.in_reasoning:
                return None
