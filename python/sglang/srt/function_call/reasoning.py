"""Thoughts before an answer."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.function_call.call_format import CallFormat
from sglang.srt.function_call.events import CallEnd
from sglang.srt.function_call.output import Output, SpaceHold
from sglang.srt.function_call.reader import Reader, Sink, Steps, ignore, markers_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """Thoughts between `begin` and `end`. `inside`: the prompt ends within them, unless it shows otherwise.

    `in_text`: thoughts stay in the text, preceded by `begin` even if that is in the prompt, so that clients can send
    them back. `lone_end`: an answer without thoughts may begin with `end`.

    Some models call without closing their thoughts: a call in thoughts that never end is a call and ends them. A call
    that is followed by more thoughts, which are closed later, is a thought. Calls right before the end mark are calls,
    unless the answer begins with one: then they were only considered.
    """

    begin: str = "<think>"
    end: str = "</think>"
    inside: bool = False
    in_text: bool = False
    lone_end: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """Returns the texts that begin and end thoughts."""
        return (self.begin, self.end)

    @property
    def thought_marks(self) -> tuple[str, str]:
        """Returns the texts that begin and end thoughts."""
        return (self.begin, self.end)

    def starts_inside(self, prompt: str) -> bool:
        """Returns whether an output that follows `prompt` begins with thoughts."""
        prompt = prompt.rstrip()
        if prompt.endswith(self.begin):
            return True
        return self.inside and not prompt.endswith(self.end)

    def end_mark_after(self, text: str) -> str:
        """Returns the mark after which an answer beginning with `text` goes on; `end` if it has none: such an answer is
        not a thought."""
        return self.begin if text.rfind(self.begin) > text.rfind(self.end) else self.end

    def read(
        self, reader: Reader, output: Output, inside: bool, separate: bool = True, calls: CallFormat | None = None
    ) -> Steps[bool]:
        """Reads the thoughts, if any. White space next to their marks belongs to the format. Returns whether a call
        ends them, which comes next; an end mark after that call belongs to the format.

        separate: False leaves them in the text, marks included. calls: the format of calls within them.
        """
        reader.mark()
        yield from reader.space()
        begun = (yield from reader.take_marker(markers_of(self.begin))) is not None
        opening = reader.since_mark()
        reader.unmark()
        if not (begun or inside):
            output.text(opening)
            if self.lone_end and separate and (yield from reader.take_marker(markers_of(self.end))) is not None:
                output.drop_space()
                yield from reader.space()
            return False
        separate = separate and not self.in_text
        if separate:
            yield from reader.space()
        elif self.in_text and not begun:
            output.exact_text(self.begin + opening)
        else:
            output.exact_text(opening)
        sink = SpaceHold(output.reasoning).push if separate else output.exact_text
        output.begin_reasoning(sink)
        end = yield from self._thoughts(reader, output, sink, calls)
        if not output.in_reasoning:  # a call has ended the thoughts
            return separate
        if end is not None:
            reader.skip(len(end))
            if not separate:
                output.exact_text(end)
        output.end_reasoning()
        if end is not None and separate:
            yield from reader.space()
        return False

    def _thoughts(self, reader: Reader, output: Output, sink: Sink, calls: CallFormat | None) -> Steps[str | None]:
        """Passes thoughts on up to their end mark (returned, not consumed), a call, or the end of the text."""
        markers = markers_of(self.end, *(calls.opening if calls is not None else ()))
        while True:
            marker = yield from reader.until(markers, sink)
            if marker is None or marker == self.end:
                return marker
            assert calls is not None
            reader.mark()
            if (yield from self._is_called(reader, Output(reader, output.tools), calls, marker)):
                reader.rewind()
                output.end_reasoning()
                return None
            sink(reader.since_mark())
            reader.unmark()

    def _is_called(self, reader: Reader, trial: Output, calls: CallFormat, marker: str) -> Steps[bool]:
        """Returns whether `marker` begins a call that ends the thoughts; otherwise consumes it as a thought.

        trial: takes the events, which are discarded.
        """
        end, following = markers_of(self.end), markers_of(self.end, *calls.markers)
        trial.begin_reasoning(ignore)
        reader.fence(end)
        yield from calls.read_marker(reader, trial, marker)
        reader.lift_fence()
        if trial.in_reasoning:
            return False
        while True:
            if not _are_whole(trial):  # the text read may contain the end mark
                reader.rewind()
                reader.mark()
                break
            yield from reader.space()
            next_marker = yield from reader.peek_marker(following)
            if next_marker is None:
                break
            if next_marker == self.end:
                return not (yield from self._answer_calls(reader, calls))
            yield from calls.read_marker(reader, trial, next_marker)
        return (yield from reader.until(end, ignore)) is None

    def _answer_calls(self, reader: Reader, calls: CallFormat) -> Steps[bool]:
        """Returns whether a call may begin after the end mark, which comes next and is not consumed."""
        reader.mark()
        reader.skip(len(self.end))
        yield from reader.space()
        begins = (yield from reader.peek_marker(markers_of(*calls.opening))) is not None
        reader.rewind()
        return begins


def _are_whole(output: Output) -> bool:
    """Returns whether the arguments of all new calls are complete."""
    return all(event.complete for event in output.take_events() if isinstance(event, CallEnd))
