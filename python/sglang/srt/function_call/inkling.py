"""The format of Inkling: messages with one kind of content each; a call's header has the function's name, too.

<|content_thinking|>thoughts<|end_message|>
<|message_model|>f<|content_invoke_tool_json|>{"name":"f","args":{"a":1}}<|end_message|>
<|message_model|><|content_text|>answer<|end_message|><|content_model_end_sampling|>

The prompt ends with `<|message_model|>`, so that the output begins behind it; where it does not, the model writes it.
Every mark is a token of its own, and nothing of a message's header is text.

Source: the published tokenizer's tokens, as vLLM and SGLang read and write them.
"""

from __future__ import annotations

from sglang.srt.function_call.json_calls import read_call_object
from sglang.srt.function_call.messages import Bodies, MessageFormat, Start
from sglang.srt.function_call.output import MAX_HEADER, NotACall, Output
from sglang.srt.function_call.reader import Markers, Reader, Steps

MESSAGE, MESSAGE_END, TURN_END = "<|message_model|>", "<|end_message|>", "<|content_model_end_sampling|>"
TEXT, THOUGHTS, CALL = "<|content_text|>", "<|content_thinking|>", "<|content_invoke_tool_json|>"
_SHOWN = ("<|content_invoke_tool_text|>", "<|content_tool_error|>")
"""Content that is shown as text: no client can run it."""
_KINDS = (TEXT, THOUGHTS, CALL, *_SHOWN)
_KIND, _CALL = Markers(*_KINDS), Markers(CALL)
_ENDS = Markers(MESSAGE_END, TURN_END)
_ANY = Markers(MESSAGE, MESSAGE_END, TURN_END, *_KINDS)


class Inkling(MessageFormat):
    """The format of Inkling: messages whose kind is a token of its own."""

    markers = (MESSAGE, MESSAGE_END, TURN_END, *_KINDS)
    thought_marks = (THOUGHTS, MESSAGE_END)
    next_message = MESSAGE
    answer_header = TEXT

    def read(self, reader: Reader, output: Output, separate: bool, start: Start) -> Steps[None]:
        bodies = Bodies(reader, output, separate, _ENDS, _ANY)
        if start is Start.HEADER:
            yield from _begun_call(reader, output, bodies)
        else:
            yield from bodies.read(start is Start.THOUGHTS)
        while (marker := (yield from reader.until(_ANY, output.text))) is not None:
            reader.mark()
            reader.skip(len(marker))
            if marker == MESSAGE:
                yield from _message(reader, output, bodies)
            elif marker in _KINDS:
                yield from _content(reader, output, bodies, marker)
            else:
                reader.unmark()


def _begun_call(reader: Reader, output: Output, bodies: Bodies) -> Steps[None]:
    """Reads a call whose header follows the prompt's mark. Text is held back for at most the characters of the longest
    name."""
    longest = max(map(len, output.tools), default=0)
    if not longest:
        return
    reader.mark()
    header = yield from reader.word(_ANY, min(longest, MAX_HEADER))
    if header in output.tools and (yield from reader.take_marker(_CALL)) is not None:
        yield from _content(reader, output, bodies, CALL)
    else:
        reader.unmark()
        output.text(header or "")


def _message(reader: Reader, output: Output, bodies: Bodies) -> Steps[None]:
    """Reads a message after its first mark. A header without a known kind of content is text."""
    header = yield from reader.word(_ANY, MAX_HEADER)
    kind = yield from reader.take_marker(_KIND)
    if kind is None:
        reader.unmark()
        output.text(header or "")
    else:
        yield from _content(reader, output, bodies, kind)


def _content(reader: Reader, output: Output, bodies: Bodies, kind: str) -> Steps[None]:
    """Reads the content after the mark of its kind."""
    if kind == CALL:
        try:
            yield from reader.space()
            yield from read_call_object(reader, output)
            yield from reader.take_marker_after_space(_ENDS)
        except NotACall:
            output.fail()
            return
    output.succeed()
    if kind != CALL:
        yield from bodies.read(kind == THOUGHTS)


INKLING = Inkling()
