"""Readers of JSON as models write it, character by character."""

from __future__ import annotations

import json
import re

from sglang.srt.function_call.output import NotACall
from sglang.srt.function_call.reader import Reader, Sink, Steps, ignore

MAX_NESTING = 256
"""The deepest nesting of arguments: objects and arrays inside each other."""

_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_OUTSIDE = re.compile(r"[\s\w.:,+\-]*")
_CLOSER = {"{": "}", "[": "]"}


def escaped(text: str) -> str:
    """Returns `text` as part of a JSON string; pieces may be escaped one by one."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def read_string(reader: Reader, sink: Sink) -> Steps[None]:
    """Passes on a JSON string with its quotes, escaping raw line breaks and the like. Raises NotACall at the text's
    end."""
    sink('"')
    reader.skip(1)
    while True:
        following = yield from reader.run(_IN_STRING, sink)
        if not following:
            raise NotACall
        reader.skip(1)
        if following == '"':
            sink('"')
            return
        if following != "\\":
            sink(escaped(following))
            continue
        following = yield from reader.peek()
        if not following:
            raise NotACall
        reader.skip(1)
        sink("\\" + following)


def read_value(reader: Reader, sink: Sink) -> Steps[None]:
    """Passes on a JSON object, array or string with matching brackets; does not check the rest. Raises NotACall where
    something cannot be JSON, or at the text's end."""
    closers: list[str] = []
    while True:
        following = (yield from reader.run(_OUTSIDE, sink)) if closers else (yield from reader.peek())
        if following == '"':
            yield from read_string(reader, sink)
        elif following in _CLOSER and len(closers) < MAX_NESTING:
            closers.append(_CLOSER[following])
            reader.skip(1)
            sink(following)
        elif closers and following == closers[-1]:
            closers.pop()
            reader.skip(1)
            sink(following)
        else:
            raise NotACall
        if not closers:
            return


SCALAR = re.compile(r"[\w.+\-]*")


def skip_value(reader: Reader) -> Steps[None]:
    """Consumes any JSON value."""
    following = yield from reader.peek()
    if following and following in '{["':
        yield from read_value(reader, ignore)
    else:
        yield from reader.run(SCALAR, ignore)


def string_value(reader: Reader) -> Steps[str]:
    """Returns the text of a JSON string. Raises NotACall if none comes next."""
    if (yield from reader.peek()) != '"':
        raise NotACall
    parts: list[str] = []
    yield from read_string(reader, parts.append)
    try:
        return str(json.loads("".join(parts)))
    except ValueError:
        raise NotACall from None


def expect(reader: Reader, character: str) -> Steps[None]:
    """Consumes white space and `character`, or raises NotACall."""
    if (yield from reader.space()) != character:
        raise NotACall
    reader.skip(1)
