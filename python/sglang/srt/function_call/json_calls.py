"""Readers of calls whose arguments are a JSON object."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from sglang.srt.function_call.call_format import CallGrammar, one_of_row, row_in_brackets
from sglang.srt.function_call.json_text import SCALAR, expect, read_value, skip_value, string_value
from sglang.srt.function_call.output import MAX_HEADER, NotACall, Output, SkippedCall, is_object
from sglang.srt.function_call.pythonic import read_call
from sglang.srt.function_call.reader import Markers, Reader, Steps, ignore, markers_of

_ARGUMENTS = ("arguments", "parameters", "args")
BETWEEN_BARE_CALLS = re.compile(r"[\s;]*")


def read_call_object(reader: Reader, output: Output) -> Steps[None]:
    """Reads `{"name": ..., "arguments": {...}}` from the brace on: keys in any order, `parameters` or `args` as well as
    `arguments`, others ignored. Arguments are streamed if the name comes first. Raises SkippedCall after an object that
    is not a call."""
    name: str | None = None
    arguments: str | None = "{}"
    have_arguments = False
    yield from expect(reader, "{")
    while True:
        yield from reader.space()
        key = yield from string_value(reader)
        yield from expect(reader, ":")
        following = yield from reader.space()
        if key == "name" and name is None:
            name = yield from string_value(reader)
        elif key not in _ARGUMENTS or have_arguments:
            yield from skip_value(reader)
        else:
            have_arguments = True
            if following == "{" and name in output.tools:
                assert name is not None
                output.start_call(name)
                yield from read_value(reader, output.arguments)
            else:
                arguments = yield from _whole_arguments(reader)
        following = yield from reader.space()
        if following not in (",", "}"):
            raise NotACall
        reader.skip(1)
        if following == "}":
            break
    if output.in_call:
        return
    if name is None:
        raise NotACall
    if name not in output.tools or arguments is None:
        raise SkippedCall
    output.start_call(name)
    output.arguments(arguments)


def _whole_arguments(reader: Reader) -> Steps[str | None]:
    """Consumes any JSON value. Returns it if it is an object, or text of one; else None."""
    parts: list[str] = []
    following = yield from reader.peek()
    if following == '"':
        value = yield from string_value(reader)
        return value if is_object(value) else None
    if following and following in "{[":
        yield from read_value(reader, parts.append)
        return "".join(parts) if following == "{" else None
    yield from reader.run(SCALAR, parts.append)
    return "{}" if "".join(parts) == "null" else None


def call_objects(end: str) -> CallGrammar:
    """Reads a call object, or an array of them, before the text `end`, which may be missing."""
    end_marker = Markers(end)

    def grammar(reader: Reader, output: Output) -> Steps[None]:
        if (yield from reader.space()) == "[":
            yield from call_array(reader, output)
        else:
            yield from read_call_object(reader, output)
        yield from reader.take_marker_after_space(end_marker)

    return grammar


def calls_in_brackets(end: str) -> CallGrammar:
    """Reads `[f(a=1), g()]`, or an array of call objects, before the text `end`, which may be missing."""
    end_marker = Markers(end)

    def call(reader: Reader, output: Output) -> Steps[None]:
        is_object = (yield from reader.peek()) == "{"
        yield from (read_call_object if is_object else read_call)(reader, output)

    def grammar(reader: Reader, output: Output) -> Steps[None]:
        yield from row_in_brackets(reader, output, call)
        yield from reader.take_marker_after_space(end_marker)

    return grammar


def calls_by_key(end: str) -> CallGrammar:
    """Reads `[{"f": {...arguments...}}, ...]` before the text `end`, which may be missing."""
    end_marker = Markers(end)

    def call(reader: Reader, output: Output) -> Steps[None]:
        yield from expect(reader, "{")
        yield from reader.space()
        name = yield from string_value(reader)
        yield from expect(reader, ":")
        yield from reader.space()
        if name in output.tools and (yield from reader.peek()) == "{":
            output.start_call(name)
            yield from read_value(reader, output.arguments)
        else:
            yield from skip_value(reader)
        yield from expect(reader, "}")
        if not output.in_call:
            raise SkippedCall

    def grammar(reader: Reader, output: Output) -> Steps[None]:
        yield from row_in_brackets(reader, output, call)
        yield from reader.take_marker_after_space(end_marker)

    return grammar


def call_array(reader: Reader, output: Output) -> Steps[None]:
    """Reads `[{"name": ..., "arguments": {...}}, ...]`."""
    yield from row_in_brackets(reader, output, read_call_object)


def bare_call_objects(reader: Reader, output: Output) -> Steps[None]:
    """Reads call objects separated by semicolons or white space."""
    yield from reader.space()
    while True:
        yield from one_of_row(reader, output, read_call_object)
        if (yield from reader.run(BETWEEN_BARE_CALLS, ignore)) != "{":
            raise NotACall


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedArguments:
    """Reads a header with the function's name, the text `arguments`, a JSON object, `after` and `end`; the last two may
    be missing. `name`: a pattern of the header with one group. `counted`: a number may replace the name."""

    name: str
    arguments: str
    after: str = ""
    end: str = ""
    counted: bool = False

    def __call__(self, reader: Reader, output: Output) -> Steps[None]:
        header = yield from reader.word(markers_of(self.arguments), MAX_HEADER)
        match = None if header is None else re.fullmatch(self.name, header)
        if match is None:
            raise NotACall
        reader.skip(len(self.arguments))
        is_counter = self.counted and match[1].isdigit() and match[1] not in output.tools
        if (yield from reader.space()) == "{" and not is_counter:
            output.start_call(match[1])
            yield from read_value(reader, output.arguments)
        else:
            arguments = yield from _whole_arguments(reader)
            name = _function_of(arguments or "", output.tools) if is_counter else match[1]
            if arguments is None or name is None:
                raise NotACall
            output.start_call(name)
            output.arguments(arguments)
        for text in (self.after, self.end):
            if text:
                yield from reader.take_marker_after_space(markers_of(text))


def _function_of(arguments: str, tools: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Returns the only function that takes these arguments; None if there is none, or more than one."""
    if not is_object(arguments):
        return None
    keys = frozenset(msgspec.json.decode(arguments))
    names = [name for name, parameters in tools.items() if len(tools) == 1 or _takes(parameters, keys)]
    return names[0] if len(names) == 1 else None


def _takes(parameters: Mapping[str, Any], keys: frozenset[str]) -> bool:
    """Returns whether a schema allows these keys together. Looks at no more of its names than there are keys: the
    model may write many calls."""
    properties, required = parameters.get("properties"), parameters.get("required")
    if not keys <= (properties.keys() if isinstance(properties, dict) else frozenset()):
        return False
    needed = required if isinstance(required, list) else []
    return len(needed) <= len(keys) and all(key in keys for key in needed if isinstance(key, str))


def array_or_named(named: NamedArguments) -> CallGrammar:
    """Reads an array of call objects, or one call with its name before it."""

    def grammar(reader: Reader, output: Output) -> Steps[None]:
        if (yield from reader.space()) == "[":
            yield from call_array(reader, output)
        else:
            yield from named(reader, output)

    return grammar
