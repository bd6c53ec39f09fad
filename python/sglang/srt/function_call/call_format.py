"""Common frame of all call formats: markers announce a call, a grammar reads it, everything else is text."""

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

    Each call begins with one of `begin`. `sections`: marks around a row of calls; a call may also come without them.
    `bare`: first characters of an output that is a call without any marker.
    """

    begin: tuple[str, ...]
    grammar: CallGrammar
    sections: tuple[tuple[str, str], ...] = ()
    bare: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """Returns texts that the parser must see even if they are special tokens of the tokenizer."""
        return self.begin + tuple(mark for section in self.sections for mark in section)

    @property
    def opening(self) -> tuple[str, ...]:
        """Returns the texts with which a call begins."""
        return self.begin + tuple(first for first, _ in self.sections)

    def read(self, reader: Reader, output: Output, end_of_thoughts: str = "") -> Steps[None]:
        """Reads text and calls to the end of the text. `end_of_thoughts`: a call has ended the thoughts, and this mark
        of their end may still follow."""
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
        """Reads text and calls before the marker `end`, which is consumed, or to the end of the text."""
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
        """Reads the part that begins with `marker`, which comes next."""
        reader.mark()
        reader.skip(len(marker))
        if any(marker == last for _, last in self.sections):
            reader.unmark()
            output.drop_space()
        else:
            yield from attempt(reader, output, self.grammar if marker in self.begin else self._section())

    def _section(self) -> CallGrammar:
        """Returns the grammar of a section that begins with a call."""
        call = markers_of(*self.begin)

        def section(reader: Reader, output: Output) -> Steps[None]:
            yield from reader.space()
            if (yield from reader.take_marker(call)) is None:
                raise NotACall
            yield from self.grammar(reader, output)

        return section


def attempt(reader: Reader, output: Output, grammar: CallGrammar) -> Steps[None]:
    """Reads a possible call; the mark is at its beginning."""
    try:
        yield from grammar(reader, output)
    except NotACall:
        output.fail()
    else:
        output.succeed()


def one_of_row(reader: Reader, output: Output, grammar: CallGrammar) -> Steps[bool]:
    """Reads one call of several, and marks its end. Returns whether it is a call; skipped calls become text."""
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
    """Reads calls separated by commas, from the opening bracket on."""
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
    if not is_call:  # the bracket is text, like what precedes it
        raise NotACall
