"""Calls of Gemma 4: `call:f{city:<|"|>Paris<|"|>,days:3}`, which is JSON with bare keys and quotes of its own."""

from __future__ import annotations

import re

from sglang.srt.function_call.coercion import ANY, Types, as_json, parameter_types
from sglang.srt.function_call.json_text import escaped
from sglang.srt.function_call.output import MAX_HEADER, NotACall, Output
from sglang.srt.function_call.reader import Markers, Reader, Sink, Steps

END = "<tool_call|>"
MAX_DEPTH = 64
"""The deepest nesting of objects and arrays: every one is read by two generators more."""
_CALL = Markers("call:")
_QUOTE = Markers('<|"|>')
_NAME_END = Markers("{", "\n", "<")
_KEY_END = Markers(":", ",", "{", "}", "[", "]", "\n")
_BARE = re.compile(r"[^,{}\[\]]*")
_CLOSERS = {"{": "}", "[": "]"}


def keyed_call(reader: Reader, output: Output) -> Steps[None]:
    """Read a call from behind the marker on."""
    yield from reader.space()
    if (yield from reader.one_of(_CALL)) is None:
        raise NotACall
    name = yield from reader.word(_NAME_END, MAX_HEADER)
    if name is None or (yield from reader.peek()) != "{":
        raise NotACall
    name = name.strip()
    output.start_call(name)
    reader.skip(1)
    output.arguments("{")
    separator = ""
    while (yield from reader.space()) != "}":
        key = yield from _key(reader)
        output.arguments(f'{separator}"{escaped(key)}": ')
        separator = ", "
        yield from _value(reader, output.arguments, parameter_types(output.tools[name], key), 1)
        yield from _comma(reader, "}")
    reader.skip(1)
    output.arguments("}")
    yield from reader.past_space(Markers(END))


def _key(reader: Reader) -> Steps[str]:
    """Consumes a key, which may have quotes, and the colon behind it."""
    is_quoted = (yield from reader.one_of(_QUOTE)) is not None
    key = yield from reader.word(_QUOTE if is_quoted else _KEY_END, MAX_HEADER)
    if is_quoted:
        yield from reader.one_of(_QUOTE)
        yield from reader.space()
    if not key or (yield from reader.peek()) != ":":
        raise NotACall
    reader.skip(1)
    return key if is_quoted else key.strip()


def _comma(reader: Reader, closer: str) -> Steps[None]:
    """Consumes the comma between two entries; the closer stays."""
    following = yield from reader.space()
    if following == ",":
        reader.skip(1)
    elif following != closer:
        raise NotACall


def _value(reader: Reader, sink: Sink, types: Types, depth: int) -> Steps[None]:
    """Passes a value on as JSON. Without quotes it is a number, a word of JSON, or text."""
    following = yield from reader.space()
    if following and following in _CLOSERS:
        if depth == MAX_DEPTH:
            raise NotACall
        yield from _entries(reader, sink, following, depth)
    elif (yield from reader.one_of(_QUOTE)) is not None:
        sink('"')
        if (yield from reader.until(_QUOTE, lambda text: sink(escaped(text)))) is None:
            raise NotACall
        yield from reader.one_of(_QUOTE)
        sink('"')
    else:
        parts: list[str] = []
        if not (yield from reader.run(_BARE, parts.append)):
            raise NotACall
        sink(as_json("".join(parts).strip(), types))


def _entries(reader: Reader, sink: Sink, opener: str, depth: int) -> Steps[None]:
    """An object or an array, from its opening bracket on."""
    closer = _CLOSERS[opener]
    reader.skip(1)
    sink(opener)
    separator = ""
    while (yield from reader.space()) != closer:
        sink(separator)
        separator = ", "
        if opener == "{":
            key = yield from _key(reader)
            sink(f'"{escaped(key)}": ')
        yield from _value(reader, sink, ANY, depth + 1)
        yield from _comma(reader, closer)
    reader.skip(1)
    sink(closer)
