"""The frame of all formats: markers announce a call, a grammar reads it, everything else is text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang.srt.function_call.output import NotACall, Output
from sglang.srt.function_call.reader import SPACE, Markers, Reader, Steps

CallGrammar = Callable[[Reader, Output], Steps[None]]
"""Reads a call from behind its marker on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How a model writes calls.

    Each begins with one of `begin`. `section` is what stands around a row of calls; a call may also come without.
    `bare`: first characters of an output that is a call without any marker.
    """

    begin: tuple[str, ...]
    grammar: CallGrammar
    section: tuple[str, str] | None = None
    bare: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that the parser must see, also where the tokenizer has them as special tokens."""
        return self.begin + (self.section or ())

    def read(self, reader: Reader, output: Output) -> Steps[None]:
        """Text and calls, to the end of the text."""
        call = Markers(*self.begin)
        opening = Markers(*self.begin, *(self.section[:1] if self.section else ()))
        opening_or_end = Markers(*self.begin, *(self.section or ()))
        if self.bare:
            following = yield from reader.run(SPACE, output.text)
            if following and following in self.bare:
                reader.mark()
                yield from attempt(reader, output, self.grammar)
        while (
            marker := (yield from reader.until(opening_or_end if output.num_calls else opening, output.text))
        ) is not None:
            reader.mark()
            reader.skip(len(marker))
            if self.section is not None and marker == self.section[1]:
                reader.unmark()
                output.drop_space()
                continue
            yield from attempt(reader, output, self._framed(marker, call))

    def _framed(self, marker: str, call: Markers) -> CallGrammar:
        """The grammar, or that of a section's beginning with a call."""
        if marker in self.begin:
            return self.grammar

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
