"""The thoughts before an answer."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.function_call.output import Output, SpaceHold
from sglang.srt.function_call.reader import Markers, Reader, Steps


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """Thoughts between `begin` and `end`. `inside`: the prompt ends within them, unless it shows otherwise.

    `leave`: markers of calls that end the thoughts as well.
    """

    begin: str = "<think>"
    end: str = "</think>"
    inside: bool = False
    leave: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.begin, self.end)

    def starts_inside(self, prompt: str) -> bool:
        """Whether an output that follows `prompt` begins with thoughts."""
        prompt = prompt.rstrip()
        if prompt.endswith(self.begin):
            return True
        return self.inside and not prompt.endswith(self.end)

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
        if separate:
            yield from reader.space()
        else:
            output.exact_text(opening)
        output.in_reasoning = True
        thoughts = SpaceHold(output.reasoning)
        sink = thoughts.push if separate else output.exact_text
        end = yield from reader.until(Markers(self.end, *self.leave), sink)
        output.in_reasoning = False
        if end != self.end:
            return
        reader.skip(len(end))
        if separate:
            yield from reader.space()
        else:
            output.exact_text(end)
