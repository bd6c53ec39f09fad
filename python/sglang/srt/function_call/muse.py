"""The format of Muse-Glimmer: messages to recipients; those to itself are thoughts, those to a function are calls.

 to=self<|message|>thoughts<|eom|>
<|start|>assistant to=f<|message|><atem:function_calls>
<atem:invoke name="f">
<atem:parameter name="a">1</atem:parameter>
</atem:invoke>
</atem:function_calls><|eom|>
<|start|>assistant to=user<|message|>answer<|eot|>

The prompt ends with `<|start|>assistant`. What looks like a call in a message to somebody else is text.
"""

from __future__ import annotations

import re

from sglang.srt.function_call.messages import Bodies, MessageFormat, Start
from sglang.srt.function_call.output import MAX_HEADER, NotACall, Output
from sglang.srt.function_call.reader import Markers, Reader, Steps
from sglang.srt.function_call.tagged_calls import TaggedCalls

START, MESSAGE, MESSAGE_END, TURN_END = "<|start|>", "<|message|>", "<|eom|>", "<|eot|>"
_TO = " to="
_SELF, _USER = "self", "user"
_ENDS = Markers(MESSAGE_END, TURN_END)
_EDGES = Markers(START, MESSAGE_END, TURN_END)
_FIRST, _BODY = Markers(_TO), Markers(MESSAGE)
_RECIPIENT = re.compile(r"(?:^|\s)to=(\S+)")
_CALLS_BEGIN, _CALLS_END = Markers("<atem:function_calls>"), Markers("</atem:function_calls>")
_INVOKE_BEGIN = '<atem:invoke name="'
_INVOKE = Markers(_INVOKE_BEGIN)
_CALL = TaggedCalls(
    after_name='">',
    key='<atem:parameter name="',
    after_key={'">': None},
    after_value="</atem:parameter>",
    end="</atem:invoke>",
    next_tags=(_INVOKE_BEGIN, "</atem:function_calls>", MESSAGE_END, TURN_END),
    no_value=(START, MESSAGE_END, TURN_END),
)


class Muse(MessageFormat):
    """The format of Muse: messages to the user, to a tool or to the model itself (thoughts)."""

    markers = (START, MESSAGE, MESSAGE_END, TURN_END)
    thought_marks = (f"{_TO}{_SELF}{MESSAGE}", MESSAGE_END)
    next_message = f"{START}assistant"
    answer_header = f"{_TO}{_USER}{MESSAGE}"

    def read(self, reader: Reader, output: Output, separate: bool, start: Start) -> Steps[None]:
        bodies = Bodies(reader, output, separate, _ENDS, _EDGES)
        if start is Start.HEADER:
            reader.mark()
            if (yield from reader.take_marker(_FIRST)) is None:
                reader.unmark()
            else:
                yield from _message(reader, output, bodies, _TO)
        else:
            yield from bodies.read(start is Start.THOUGHTS)
        while (marker := (yield from reader.until(_EDGES, output.text))) is not None:
            reader.mark()
            reader.skip(len(marker))
            if marker == START:
                yield from _message(reader, output, bodies, "")
            else:
                reader.unmark()


def _message(reader: Reader, output: Output, bodies: Bodies, begun: str) -> Steps[None]:
    """Reads a message after the part `begun` of its header; the mark is at its beginning."""
    try:
        header = yield from reader.word(_BODY, MAX_HEADER)
        if header is None:
            raise NotACall
        reader.skip(len(MESSAGE))
        recipient = _RECIPIENT.search(begun + header)
        calls = recipient is not None and recipient[1] not in (_SELF, _USER)
        if calls:
            yield from _calls(reader, output)
    except NotACall:
        output.fail()
        return
    output.succeed()
    if not calls:
        yield from bodies.read(recipient is not None and recipient[1] == _SELF)


def _calls(reader: Reader, output: Output) -> Steps[None]:
    yield from reader.take_marker_after_space(_CALLS_BEGIN)
    if (yield from reader.take_marker_after_space(_INVOKE)) is None:
        raise NotACall
    while True:
        yield from _CALL(reader, output)
        if (yield from reader.take_marker_after_space(_INVOKE)) is None:
            break
        output.succeed()
        reader.mark()
    yield from reader.take_marker_after_space(_CALLS_END)
    yield from reader.take_marker_after_space(_ENDS)


MUSE = Muse()
