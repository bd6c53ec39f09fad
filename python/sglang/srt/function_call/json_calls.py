"""Calls whose arguments are a JSON object."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sglang.srt.function_call.call_format import CallGrammar
from sglang.srt.function_call.json_text import expect, read_value, skip_value, string_value
from sglang.srt.function_call.output import MAX_HEADER, NotACall, Output
from sglang.srt.function_call.reader import Markers, Reader, Steps, ignore

_ARGUMENTS = ("arguments", "parameters")
_BETWEEN_BARE_CALLS = re.compile(r"[\s;]*")


def read_call_object(reader: Reader, output: Output) -> Steps[None]:
    """`{"name": ..., "arguments": {...}}`, from the brace on: keys in any order, `parameters` as well as `arguments`,
    others ignored. The arguments stream if the name comes first."""
    name: str | None = None
    waiting: list[str] | None = None
    yield from expect(reader, "{")
    while True:
        yield from reader.space()
        key = yield from string_value(reader)
        yield from expect(reader, ":")
        following = yield from reader.space()
        if key == "name" and name is None:
            name = yield from string_value(reader)
            if name not in output.tools:
                raise NotACall
        elif key in _ARGUMENTS and following == "{" and waiting is None and not output.in_call:
            if name is None:
                waiting = []
                yield from read_value(reader, waiting.append)
            else:
                output.start_call(name)
                yield from read_value(reader, output.arguments)
        else:
            yield from skip_value(reader)
        following = yield from reader.space()
        if following not in (",", "}"):
            raise NotACall
        reader.skip(1)
        if following == "}":
            break
    if name is None:
        raise NotACall
    if not output.in_call:
        output.start_call(name)
        output.arguments("".join(waiting) if waiting is not None else "{}")


def call_object(end: str) -> CallGrammar:
    """A call object before the text `end`, which may be missing."""
    end_marker = Markers(end)

    def grammar(reader: Reader, output: Output) -> Steps[None]:
        yield from reader.space()
        yield from read_call_object(reader, output)
        yield from reader.space()
        yield from reader.one_of(end_marker)

    return grammar


def call_array(reader: Reader, output: Output) -> Steps[None]:
    """`[{"name": ..., "arguments": {...}}, ...]`."""
    yield from expect(reader, "[")
    while True:
        yield from reader.space()
        yield from read_call_object(reader, output)
        output.succeed()
        reader.mark()
        following = yield from reader.space()
        if following not in (",", "]"):
            raise NotACall
        reader.skip(1)
        if following == "]":
            return


def bare_call_objects(reader: Reader, output: Output) -> Steps[None]:
    """Call objects with semicolons or white space between them."""
    yield from reader.space()
    yield from read_call_object(reader, output)
    while True:
        output.succeed()
        reader.mark()
        if (yield from reader.run(_BETWEEN_BARE_CALLS, ignore)) != "{":
            raise NotACall
        yield from read_call_object(reader, output)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedArguments:
    """A header with the function's name, the text `arguments`, a JSON object, `after` and `end`, either of which may be
    missing. `name`: a pattern for the header, with one group."""

    name: str
    arguments: str
    after: str = ""
    end: str = ""

    def __call__(self, reader: Reader, output: Output) -> Steps[None]:
        header = yield from reader.word(Markers(self.arguments), MAX_HEADER)
        match = None if header is None else re.fullmatch(self.name, header)
        if match is None:
            raise NotACall
        reader.skip(len(self.arguments))
        if (yield from reader.space()) != "{":
            raise NotACall
        output.start_call(match[1])
        yield from read_value(reader, output.arguments)
        for text in (self.after, self.end):
            if text:
                yield from reader.space()
                yield from reader.one_of(Markers(text))


def array_or_named(named: NamedArguments) -> CallGrammar:
    """An array of call objects, or one call with its name in front."""

    def grammar(reader: Reader, output: Output) -> Steps[None]:
        if (yield from reader.space()) == "[":
            yield from call_array(reader, output)
        else:
            yield from named(reader, output)

    return grammar
