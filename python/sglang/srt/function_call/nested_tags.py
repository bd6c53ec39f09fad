"""Reader of MiniMax-M3's calls: arguments are tags with their names, and so are the entries of objects and arrays. The
same special token stands before every tag. A value may contain one: its own end tag counts only if another tag follows.

]<]minimax[>[<invoke name="f">]<]minimax[>[<city>Paris]<]minimax[>[</city>]<]minimax[>[</invoke>
"""

from __future__ import annotations

from sglang.srt.function_call.coercion import as_json
from sglang.srt.function_call.json_text import escaped
from sglang.srt.function_call.known_schemas import ITEM, Level
from sglang.srt.function_call.output import MAX_HEADER, NotACall, Output
from sglang.srt.function_call.reader import Markers, Reader, Sink, Steps, markers_of
from sglang.srt.function_call.schema_types import Types

TAG = "]<]minimax[>["
MAX_DEPTH = 64
"""The deepest nesting of objects and arrays: every one is read by two generators more."""
_TAG = Markers(TAG)
_NAME_END = Markers('">')
_KEY_END = Markers(">", "<")
_OPEN, _CLOSE = "<", "</"
_STRING = frozenset(("string",))


def nested_tags(reader: Reader, output: Output) -> Steps[None]:
    """Reads a call after `<invoke name="`."""
    name = yield from reader.word(_NAME_END, MAX_HEADER)
    if name is None:
        raise NotACall
    reader.skip(len('">'))
    yield from reader.space()
    if (yield from reader.peek_marker(_TAG)) is None:
        raise NotACall
    output.start_call(name.strip())
    yield from _entries(reader, output.arguments, output.schemas.level([output.tools[name.strip()]], {}), "invoke", 1)


def _entries(reader: Reader, sink: Sink, level: Level, parent: str, depth: int) -> Steps[None]:
    """Passes on the tags up to the end of `parent`, as a JSON object, or as an array if the first tag is that of an
    array's entry."""
    first, closer = True, ""
    while True:
        yield from reader.space()
        key = yield from _tag(reader, parent)
        if first:
            opener, closer = ("[", "]") if key == ITEM and level.is_array else ("{", "}")
            sink(opener)
        if key is None:
            break
        sink("" if first else ", ")
        first = False
        if closer == "}":
            sink(f'"{escaped(key)}": ')
        yield from _value(reader, sink, level, key, depth)
    sink(closer)


def _tag(reader: Reader, parent: str) -> Steps[str | None]:
    """Consumes a tag and returns its name; None for the end of `parent`."""
    end = f"{_CLOSE}{parent}>"
    if (yield from reader.take_marker(_TAG)) is None:
        raise NotACall
    yield from reader.space()
    if (yield from reader.take_marker(markers_of(end))) is not None:
        return None
    if (yield from reader.peek()) != _OPEN:
        raise NotACall
    reader.skip(1)
    key = yield from reader.word(_KEY_END, MAX_HEADER)
    if not key or (yield from reader.peek()) != ">":
        raise NotACall
    reader.skip(1)
    return key


def _value(reader: Reader, sink: Sink, level: Level, key: str, depth: int) -> Steps[None]:
    """Passes on the text between the tags of `key`, as JSON."""
    types = level.types(key)
    end = f"{TAG}{_CLOSE}{key}>"
    ends, behind = markers_of(end), {end: _TAG}
    if types == _STRING:
        sink('"')
        if (yield from reader.until(ends, lambda text: sink(escaped(text)), behind)) is None:
            raise NotACall
        reader.skip(len(end))
        sink('"')
        return
    parts: list[str] = []
    if (yield from reader.until(_TAG, parts.append)) is None:
        raise NotACall
    is_text, is_end = "".join(parts).strip() != "", (yield from reader.peek_marker(ends)) is not None
    if is_end or (is_text and (not types or "string" in types)):
        if (yield from reader.until(ends, parts.append, behind)) is None:
            raise NotACall
        reader.skip(len(end))
        sink(_leaf("".join(parts), types))
    elif is_text or depth == MAX_DEPTH:
        raise NotACall
    else:
        yield from _entries(reader, sink, level.below(key), key, depth + 1)


def _leaf(text: str, types: Types) -> str:
    """Returns a value without entries as JSON; an empty one becomes the empty value of a type without another
    spelling."""
    if not text.strip() and types and "string" not in types:
        for kind, empty in (("object", "{}"), ("array", "[]"), ("null", "null")):
            if kind in types:
                return empty
    return as_json(text, types)
