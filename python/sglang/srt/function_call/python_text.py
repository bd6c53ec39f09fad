"""Converts Python literals to JSON, character by character."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from sglang.srt.function_call.json_text import MAX_NESTING, escaped, read_string
from sglang.srt.function_call.output import NotACall, is_container
from sglang.srt.function_call.reader import Reader, Sink, Steps

_WORD = re.compile(r"[\w.+\-]*")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_BRACKETS = {"[": ("[", "]", "]"), "(": ("[", ")", "]"), "{": ("{", "}", "}")}
"""Opening bracket -> its JSON, the closing one, and its JSON."""
_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "a": "\a",
    "0": "\0",
    "\n": "",
    "\\": "\\",
    "'": "'",
    '"': '"',
}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile(r"[0-9a-fA-F]")
_PLAIN = {quote: re.compile(rf"[^\\\n{quote}]*") for quote in "'\""}


def object_as_json(text: str) -> str | None:
    """Returns an object or array in Python's syntax as JSON; None if `text` is neither."""
    value = _whole(text, read_literal)
    return value if value is not None and is_container(value) else None


def string_as_json(text: str) -> str:
    """Returns a quoted text as JSON. Escapes have JSON's meaning, else Python's, else they are text."""
    readers = (read_string, read_literal) if text.startswith('"') else (read_literal,)
    values = (_whole(text, read) for read in readers)
    return next((value for value in values if value is not None and _is_text(value)), f'"{escaped(text[1:-1])}"')


def _whole(text: str, read: Callable[[Reader, Sink], Steps[None]]) -> str | None:
    """Returns the result of `read` for all of `text`; None if it does not fit."""
    reader, parts = Reader(), list[str]()
    reader.feed(text)
    reader.end()
    try:
        for _ in read(reader, parts.append):
            pass
    except NotACall:
        return None
    return "".join(parts) if reader.offset == len(text) else None


def _is_text(value: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(value), str)
    except msgspec.DecodeError:
        return False


def read_literal(reader: Reader, sink: Sink) -> Steps[None]:
    """Reads a literal and passes it on as JSON."""
    closers: list[tuple[str, str]] = []
    comma = False
    while True:
        following = yield from reader.space()
        if closers and following == closers[-1][0]:
            reader.skip(1)
            sink(closers.pop()[1])
            comma = False
        else:
            if comma:
                sink(", ")
                comma = False
            if following in _BRACKETS and len(closers) < MAX_NESTING:
                opening, closing, json_closing = _BRACKETS[following]
                reader.skip(1)
                sink(opening)
                closers.append((closing, json_closing))
                continue
            yield from _scalar(reader, sink, following)
        if not closers:
            return
        following = yield from reader.space()
        if following == ",":
            reader.skip(1)
            comma = True
        elif following == ":":
            reader.skip(1)
            sink(": ")
        elif following != closers[-1][0]:
            raise NotACall


def _scalar(reader: Reader, sink: Sink, first: str) -> Steps[None]:
    if first and first in _PLAIN:
        yield from _string(reader, sink, first)
        return
    parts: list[str] = []
    yield from reader.run(_WORD, parts.append)
    word = "".join(parts)
    if word in _WORDS:
        sink(_WORDS[word])
    elif _NUMBER.fullmatch(word):
        sink(word)
    else:
        raise NotACall


def _string(reader: Reader, sink: Sink, quote: str) -> Steps[None]:
    sink('"')
    reader.skip(1)
    while True:
        following = yield from reader.run(_PLAIN[quote], lambda text: sink(escaped(text)))
        if not following:
            raise NotACall
        reader.skip(1)
        if following == quote:
            break
        if following == "\\":
            following = yield from reader.peek()
            if not following:
                raise NotACall
            reader.skip(1)
            if following in _HEX_DIGITS:
                sink(escaped((yield from _code_point(reader, _HEX_DIGITS[following]))))
                continue
            following = _ESCAPES.get(following, "\\" + following)
        sink(escaped(following))
    sink('"')


def _code_point(reader: Reader, num_digits: int) -> Steps[str]:
    digits = ""
    for _ in range(num_digits):
        digit = yield from reader.peek()
        if not _HEX.fullmatch(digit):
            raise NotACall
        reader.skip(1)
        digits += digit
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise NotACall
    return chr(code)
