"""Harmony, the format of GPT-OSS: messages with a channel, thoughts and calls among them.

<|channel|>analysis<|message|>thoughts<|end|>
<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>
<|start|>assistant<|channel|>final<|message|>answer<|return|>
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sglang.srt.function_call.json_text import read_value
from sglang.srt.function_call.messages import Bodies, MessageFormat, Start
from sglang.srt.function_call.output import MAX_HEADER, NotACall, Output
from sglang.srt.function_call.reader import Markers, Reader, Steps

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ANALYSIS, FINAL = "analysis", "final"

_ENDS = (END, CALL, RETURN)
_END = Markers(*_ENDS)
_ANY = Markers(START, CHANNEL, *_ENDS)
_AFTER_ROLE = Markers(CHANNEL, MESSAGE)
_BODY = Markers(MESSAGE)
_TO = " to="
_RECIPIENT_FIRST = Markers(_TO)
"""The markers of an output that continues `<|start|>assistant` by addressing a function."""
_RECIPIENT = re.compile(r"(?:^|\s)to=(\S+)")
_FUNCTIONS = "functions."


@dataclass(frozen=True, slots=True)
class _Header:
    channel: str
    recipient: str | None


class Harmony(MessageFormat):
    """The format of gpt-oss: messages with a channel, a recipient and a body."""

    markers = (START, CHANNEL, CONSTRAIN, MESSAGE, *_ENDS)
    thought_marks = (f"{CHANNEL}{ANALYSIS}{MESSAGE}", END)
    next_message = f"{START}assistant"
    answer_header = f"{CHANNEL}{FINAL}{MESSAGE}"

    def read(self, reader: Reader, output: Output, separate: bool, start: Start) -> Steps[None]:
        messages = _Messages(reader, output, separate)
        if start is Start.HEADER:
            reader.mark()
            if (yield from reader.take_marker(_RECIPIENT_FIRST)) is None:
                reader.unmark()
            else:
                yield from messages.read(_TO)
        else:
            yield from messages.bodies.read(start is Start.THOUGHTS)
        while (marker := (yield from reader.until(_ANY, output.text))) is not None:
            reader.mark()
            reader.skip(len(marker))
            if marker in _ENDS:
                reader.unmark()
            else:
                yield from messages.read(marker)


class _Messages:
    def __init__(self, reader: Reader, output: Output, separate: bool) -> None:
        self._reader = reader
        self._output = output
        self.bodies = Bodies(reader, output, separate, _END, _ANY)

    def read(self, marker: str) -> Steps[None]:
        """Reads a message after `marker`; the mark is before it."""
        reader, output = self._reader, self._output
        try:
            header = yield from _header(reader, marker)
            if header.recipient is not None:
                yield from _call(reader, output, header.recipient)
        except NotACall:
            output.fail()
            return
        output.succeed()
        if header.recipient is None:
            yield from self.bodies.read(header.channel == ANALYSIS)


def _header(reader: Reader, marker: str) -> Steps[_Header]:
    """Reads a header after its first marker, up to the body."""
    role = ""
    if marker != CHANNEL:
        role = marker + ((yield from reader.word(_AFTER_ROLE, MAX_HEADER)) or "")
        if (yield from reader.take_marker(_AFTER_ROLE)) != CHANNEL:
            raise NotACall
    header = yield from reader.word(_BODY, MAX_HEADER)
    if header is None:
        raise NotACall
    reader.skip(len(MESSAGE))
    header = header.replace(CONSTRAIN, " ")
    recipient = _RECIPIENT.search(f"{role.removeprefix(START)} {header}")
    return _Header((header.split() or [""])[0], recipient[1] if recipient is not None else None)


def _call(reader: Reader, output: Output, recipient: str) -> Steps[None]:
    if not recipient.startswith(_FUNCTIONS) or (yield from reader.space()) != "{":
        raise NotACall
    output.start_call(recipient.removeprefix(_FUNCTIONS))
    yield from read_value(reader, output.arguments)
    yield from reader.take_marker_after_space(_END)


HARMONY = Harmony()
