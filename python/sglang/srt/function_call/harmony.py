"""Harmony, the format of GPT-OSS: messages with a channel, thoughts and calls among them.

<|channel|>analysis<|message|>thoughts<|end|>
<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>
<|start|>assistant<|channel|>final<|message|>answer<|return|>
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sglang.srt.function_call.json_text import read_value
from sglang.srt.function_call.output import MAX_HEADER, NotACall, Output
from sglang.srt.function_call.reader import Markers, Reader, Steps

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ANALYSIS = "analysis"

_ENDS = (END, CALL, RETURN)
_END = Markers(*_ENDS)
_ANY = Markers(START, CHANNEL, *_ENDS)
_AFTER_ROLE = Markers(CHANNEL, MESSAGE)
_BODY = Markers(MESSAGE)
_RECIPIENT = re.compile(r"(?:^|\s)to=(\S+)")
_FUNCTIONS = "functions."
_BETWEEN_THOUGHTS = "\n"


@dataclass(frozen=True, slots=True)
class _Header:
    channel: str
    recipient: str | None


class Harmony:
    """Both a call format and a reasoning format."""

    markers = (START, CHANNEL, CONSTRAIN, MESSAGE, *_ENDS)
    inside = True

    def read(self, reader: Reader, output: Output, separate: bool) -> Steps[None]:
        """A whole output. separate: whether thoughts are kept apart from the text."""
        num_thoughts = 0
        while (marker := (yield from reader.until(_ANY, output.text))) is not None:
            reader.mark()
            reader.skip(len(marker))
            if marker in _ENDS:
                reader.unmark()
                continue
            try:
                header = yield from _header(reader, marker)
                if header.recipient is not None:
                    yield from _call(reader, output, header.recipient)
            except NotACall:
                output.fail()
                continue
            output.succeed()
            if header.recipient is None:
                is_thought = separate and header.channel == ANALYSIS
                if is_thought and num_thoughts:
                    output.reasoning(_BETWEEN_THOUGHTS)
                num_thoughts += is_thought
                output.in_reasoning = header.channel == ANALYSIS
                yield from reader.until(_ANY, output.reasoning if is_thought else output.text)
                yield from reader.one_of(_END)
                if output.in_reasoning:
                    output.end_reasoning()


def _header(reader: Reader, marker: str) -> Steps[_Header]:
    """From behind the first marker to the body."""
    role = ""
    if marker == START:
        role = (yield from reader.word(_AFTER_ROLE, MAX_HEADER)) or ""
        if (yield from reader.one_of(_AFTER_ROLE)) != CHANNEL:
            raise NotACall
    header = yield from reader.word(_BODY, MAX_HEADER)
    if header is None:
        raise NotACall
    reader.skip(len(MESSAGE))
    header = header.replace(CONSTRAIN, " ")
    recipient = _RECIPIENT.search(f"{role} {header}")
    return _Header((header.split() or [""])[0], recipient[1] if recipient is not None else None)


def _call(reader: Reader, output: Output, recipient: str) -> Steps[None]:
    if not recipient.startswith(_FUNCTIONS) or (yield from reader.space()) != "{":
        raise NotACall
    output.start_call(recipient.removeprefix(_FUNCTIONS))
    yield from read_value(reader, output.arguments)
    yield from reader.space()
    yield from reader.one_of(_END)


HARMONY = Harmony()
