"""The frame of all formats: markers announce a call, a grammar reads it, everything else is text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang.srt.function_call.json_text import expect
from sglang.srt.function_call.output import NotACall, Output, SkippedCall
from sglang.srt.function_call.reader import SPACE, Markers, Reader, Steps, markers_of

CallGrammar = Callable[[Reader, Output], Steps[None]]
"""Reads a call from behind its marker on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """The form in which a model writes calls.

    Each begins with one of `begin`. `sections`: what stands around a row of calls; a call may also come without.
    `bare`: first characters of an output that is a call without any marker.
    """

    begin: tuple[str, ...]
    grammar: CallGrammar
    sections: tuple[tuple[str, str], ...] = ()
    bare: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that the parser must see, also where the tokenizer has them as special tokens."""
        return self.begin + tuple(mark for section in self.sections for mark in section)

    @property
    def opening(self) -> tuple[str, ...]:
        """Texts with which a call begins."""
        return self.begin + tuple(first for first, _ in self.sections)

    def read(self, reader: Reader, output: Output, end_of_thoughts: str = "") -> Steps[None]:
        """Text and calls, to the end of the text. `end_of_thoughts`: a call has ended the thoughts, and this mark of
        their end may still come."""
        if end_of_thoughts:
            yield from self._read_to(reader, output, markers_of(*self.markers, end_of_thoughts), end_of_thoughts)
        opening, opening_or_end = markers_of(*self.opening), markers_of(*self.markers)
        if self.bare and not output.num_calls:
            following = yield from reader.run(SPACE, output.text)
            if following and following in self.bare:
                reader.mark()
                yield from attempt(reader, output, self.grammar)
        while (
            marker := (yield from reader.until(opening_or_end if output.num_calls else opening, output.text))
        ) is not None:
            yield from self.read_marker(reader, output, marker)

    def _read_to(self, reader: Reader, output: Output, markers: Markers, end: str) -> Steps[None]:
        """Text and calls before the marker `end`, which is consumed, or to the end of the text."""
        while (marker := (yield from reader.until(markers, output.text))) is not None:
            if marker != end:
                yield from self.read_marker(reader, output, marker)
                continue
            reader.skip(len(end))
            if not output.text_since_call:
                output.drop_space()
                yield from reader.space()
            return

    def read_marker(self, reader: Reader, output: Output, marker: str) -> Steps[None]:
        """Read what begins with `marker`, which comes next."""
        reader.mark()
        reader.skip(len(marker))
        if any(marker == last for _, last in self.sections):
            reader.unmark()
            output.drop_space()
        else:
            yield from attempt(reader, output, self.grammar if marker in self.begin else self._section())

    def _section(self) -> CallGrammar:
        """The grammar of a section's beginning with a call."""
        call = markers_of(*self.begin)

        def section(reader: Reader, output: Output) -> Steps[None]:
            yield from reader.space()
            if (yield from reader.one_of(call)) is None:
                raise NotACall
            yield from self.grammar(reader, output)

        return section


def attempt(reader: Reader, output: Output, grammar: CallGrammar) -> Steps[None]:
    """Reads what may be a call; the mark is at its beginning."""
    try:
        yield from grammar(reader, output)
    except NotACall:
        output.fail()
    else:
        output.succeed()


def one_of_row(reader: Reader, output: Output, grammar: CallGrammar) -> Steps[bool]:
    """Reads a call among others, and marks its end. Returns whether it is a call; what is skipped becomes text."""
    try:
        yield from grammar(reader, output)
    except SkippedCall:
        output.fail()
        is_call = False
    else:
        output.succeed()
        is_call = True
    reader.mark()
    return is_call


def row_in_brackets(reader: Reader, output: Output, grammar: CallGrammar) -> Steps[None]:
    """Calls with commas between them, from the opening bracket on."""
    yield from expect(reader, "[")
    while True:
        yield from reader.space()
        is_call = yield from one_of_row(reader, output, grammar)
        following = yield from reader.space()
        if following not in (",", "]"):
            raise NotACall
        reader.skip(1)
        if following == "]":
            break
    if not is_call:  # the bracket belongs to the text in front of it
        raise NotACall
