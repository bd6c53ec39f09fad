"""Reader of Gemma 4's calls: `call:f{city:<|"|>Paris<|"|>,days:3}`, which is JSON with bare keys and its own quotes.

Models also write JSON's or Python's quotes, and `=` between a key and its value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from sglang.srt.function_call.coercion import as_json
from sglang.srt.function_call.json_text import escaped
from sglang.srt.function_call.known_schemas import KnownSchemas
from sglang.srt.function_call.output import MAX_HEADER, NotACall, Output
from sglang.srt.function_call.python_text import string_as_json
from sglang.srt.function_call.reader import Markers, Reader, Sink, Steps, markers_of
from sglang.srt.function_call.schema_types import ANY, Types

END = "<tool_call|>"
MAX_DEPTH = 64
"""The deepest nesting of objects and arrays: every one is read by two generators more."""
_CALL = Markers("call:")
_QUOTE = '<|"|>'
_QUOTES = Markers(_QUOTE), Markers('"', "'")
_NAME_END = Markers("{", "\n", "<")
_KEY_END = Markers(":", "=", ",", "{", "}", "[", "]", "\n")
_BEHIND_KEY = Markers(":", "=")
_BEHIND_VALUE = Markers(",", "}", "]")
_BARE = re.compile(r"[^,{}\[\]]*")
_IN_QUOTES = re.compile(r"\"[^\"]+\"|'[^']+'")
_CLOSERS = {"{": "}", "[": "]"}
_UNKNOWN: Mapping[str, Any] = {}
"""The schema of values inside of values."""


def keyed_calls(reader: Reader, output: Output) -> Steps[None]:
    """Reads a call after its marker, and following ones without a marker."""
    if (yield from reader.take_marker_after_space(_CALL)) is None:
        raise NotACall
    while True:
        yield from _call(reader, output)
        output.succeed()
        reader.mark()
        if (yield from reader.take_marker_after_space(_CALL)) is None:
            return


def _call(reader: Reader, output: Output) -> Steps[None]:
    name = yield from reader.word(_NAME_END, MAX_HEADER)
    if name is None or (yield from reader.peek()) != "{":
        raise NotACall
    name = name.strip()
    output.start_call(name)
    yield from _Arguments(reader, output.arguments, output.schemas).read("{", 1, output.tools[name])
    yield from reader.take_marker_after_space(markers_of(END))


class _Arguments:
    """Passes on the arguments of a call as JSON."""

    def __init__(self, reader: Reader, sink: Sink, schemas: KnownSchemas) -> None:
        self._reader = reader
        self._sink = sink
        self._schemas = schemas

    def read(self, opener: str, depth: int, schema: Mapping[str, Any]) -> Steps[None]:
        """Reads an object or array from its opening bracket on. schema: of an object, if known."""
        reader, closer = self._reader, _CLOSERS[opener]
        reader.skip(1)
        self._sink(opener)
        separator = ""
        while (yield from reader.space()) != closer:
            self._sink(separator)
            separator = ", "
            types = ANY
            if opener == "{":
                key = yield from self._key()
                self._sink(f'"{escaped(key)}": ')
                types = self._schemas.types(schema, key)
            yield from self._value(types, depth)
            following = yield from reader.space()
            if following == ",":
                reader.skip(1)
            elif following != closer:
                raise NotACall
        reader.skip(1)
        self._sink(closer)

    def _key(self) -> Steps[str]:
        """Consumes a key, which may be quoted, and the separator before its value."""
        reader = self._reader
        is_quoted = (yield from reader.take_marker(_QUOTES[0])) is not None
        key = yield from reader.word(_QUOTES[0] if is_quoted else _KEY_END, MAX_HEADER)
        if is_quoted:
            yield from reader.take_marker(_QUOTES[0])
            yield from reader.space()
        if not key or (yield from reader.take_marker(_BEHIND_KEY)) is None:
            raise NotACall
        if is_quoted:
            return key
        key = key.strip()
        return key[1:-1] if _IN_QUOTES.fullmatch(key) else key

    def _quote(self) -> Steps[str | None]:
        """Returns the quote that comes next, without consuming it."""
        for quotes in _QUOTES:
            if (quote := (yield from self._reader.peek_marker(quotes))) is not None:
                return quote
        return None

    def _value(self, types: Types, depth: int) -> Steps[None]:
        """Reads a value. Without quotes it is a number, a word of JSON, or text."""
        following = yield from self._reader.space()
        quote = yield from self._quote()
        if following and following in _CLOSERS:
            if depth == MAX_DEPTH:
                raise NotACall
            yield from self.read(following, depth + 1, _UNKNOWN)
        elif quote == _QUOTE:
            yield from self._string()
        elif quote is None or not (yield from self._quoted(quote)):
            parts: list[str] = []
            if not (yield from self._reader.run(_BARE, parts.append)):
                raise NotACall
            self._sink(as_json("".join(parts).strip(), types))

    def _string(self) -> Steps[None]:
        """Reads a text between the format's own quotes."""
        quote = markers_of(_QUOTE)
        self._reader.skip(len(_QUOTE))
        self._sink('"')
        if (
            yield from self._reader.until(quote, lambda text: self._sink(escaped(text)), {_QUOTE: _BEHIND_VALUE})
        ) is None:
            raise NotACall
        self._reader.skip(len(_QUOTE))
        self._sink('"')

    def _quoted(self, quote: str) -> Steps[bool]:
        """Reads a text in JSON's or Python's quotes. Returns False, consuming nothing, if it does not end."""
        reader, parts = self._reader, [quote]
        if reader.offset >= reader.unclosed_from.get(quote, math.inf):
            return False
        reader.mark()
        reader.skip(1)
        ends = markers_of("\\", quote)
        while (end := (yield from reader.until(ends, parts.append, {quote: _BEHIND_VALUE}))) is not None:
            reader.skip(1)
            parts.append(end)
            if end == quote:
                reader.unmark()
                self._sink(string_as_json("".join(parts)))
                return True
            parts.append((yield from reader.peek()))
            reader.skip(len(parts[-1]))
        reader.rewind()
        reader.unclosed_from[quote] = reader.offset
        return False
