"""The thoughts before an answer."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.function_call.output import Output, SpaceHold
from sglang.srt.function_call.reader import Markers, Reader, Steps


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """Thoughts between `begin` and `end`. `inside`: the prompt ends within them, unless it shows otherwise.

    `leave`: markers of calls that end the thoughts as well. `in_text`: thoughts stay in the text, with `begin` in front
    also where the prompt has it, so that clients can send them back.
    """

    begin: str = "<think>"
    end: str = "</think>"
    inside: bool = False
    leave: tuple[str, ...] = ()
    in_text: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.begin, self.end)

    @property
    def around_thoughts(self) -> tuple[str, str]:
        return (self.begin, self.end)

    def starts_inside(self, prompt: str) -> bool:
        """Whether an output that follows `prompt` begins with thoughts."""
        prompt = prompt.rstrip()
        if prompt.endswith(self.begin):
            return True
        return self.inside and not prompt.endswith(self.end)

    def last_mark(self, text: str) -> str:
        """The mark behind which an answer that has begun with `text` goes on; `end` where there is none: such an answer
        is no thought."""
        return self.begin if text.rfind(self.begin) > text.rfind(self.end) else self.end

    def read(self, reader: Reader, output: Output, inside: bool, separate: bool = True) -> Steps[None]:
        """The thoughts, if there are any. White space next to their marks belongs to the format.

        separate: False leaves them in the text, marks and all.
        """
        reader.mark()
        yield from reader.space()
        begun = (yield from reader.one_of(Markers(self.begin))) is not None
        opening = reader.since_mark()
        reader.unmark()
        if not (begun or inside):
            output.text(opening)
            return
        separate = separate and not self.in_text
        if separate:
            yield from reader.space()
        elif self.in_text and not begun:
            output.exact_text(self.begin + opening)
        else:
            output.exact_text(opening)
        output.in_reasoning = True
        thoughts = SpaceHold(output.reasoning)
        sink = thoughts.push if separate else output.exact_text
        end = yield from reader.until(Markers(self.end, *self.leave), sink)
        if end == self.end:
            reader.skip(len(end))
            if not separate:
                output.exact_text(end)
        output.end_reasoning()
        if end == self.end and separate:
            yield from reader.space()
