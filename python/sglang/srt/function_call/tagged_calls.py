"""Reader of calls whose arguments are tagged values, similar to XML but mostly without escapes."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from dataclasses import dataclass
from html.entities import html5

from sglang.srt.function_call.coercion import as_json
from sglang.srt.function_call.json_text import escaped, read_value
from sglang.srt.function_call.output import MAX_HEADER, NotACall, Output
from sglang.srt.function_call.reader import Reader, Sink, Steps, markers_of
from sglang.srt.function_call.schema_types import ANY

STRING = frozenset(("string",))


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedCalls:
    """Reads a call after its marker: name, `after_name`, then for each argument `key`, its name, one of `after_key`,
    perhaps `value`, its value and `after_value`; at last `end`.

    `after_end`: may follow `end`. `cdata`: marks around a value that may contain any tags.

    `after_name` of "": a line break or a tag ends the name. `closing`: ends the name and the call. `after_key`: text ->
    whether the value that follows is a string; None: the tool's schema decides. `lines`: values are on lines of their
    own. `escapes`: values may have character references such as `&lt;`. `json_body`: a JSON object may replace all
    arguments. `next_tags`: the call ends before one of these, also without `end`. `no_end`: texts that end a value
    without `after_value`, on a line of its own and within a line. `no_value`: texts that no value contains; the call
    breaks off there.

    A value may contain end tags: `after_value` counts if the next key or the end of the call follows, `end` within a
    value if one of `next_tags` follows, and both at the end of the text.
    """

    after_name: str = ""
    closing: tuple[str, ...] = ()
    key: str
    after_key: Mapping[str, bool | None]
    value: str = ""
    after_value: str
    end: str
    after_end: str = ""
    cdata: tuple[str, str] | None = None
    lines: bool = False
    escapes: bool = False
    json_body: bool = False
    next_tags: tuple[str, ...]
    no_value: tuple[str, ...] = ()
    no_end: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    def __call__(self, reader: Reader, output: Output) -> Steps[None]:
        name, is_closed = yield from self._name(reader)
        if is_closed:
            output.start_call(name)
            output.arguments("{}")
            return
        if self.json_body and (yield from reader.space()) == "{":
            yield from self._json_body(reader, output, name)
            return
        tag = yield from self._next_tag(reader)
        output.start_call(name)
        separator = "{"
        while tag == self.key:
            key, is_string = yield from self._key(reader)
            types = {True: STRING, False: ANY, None: output.schemas.types(output.tools[name], key)}[is_string]
            output.arguments(f'{separator}"{escaped(key)}": ')
            separator = ", "
            if types == STRING:
                yield from self._stream_string(reader, output)
            else:
                value: list[str] = []
                yield from self._read_value(reader, value.append)
                output.arguments(as_json("".join(value), types))
            tag = yield from self._next_tag(reader)
        output.arguments("{}" if separator == "{" else "}")
        if self.after_end:
            yield from reader.take_marker_after_space(markers_of(self.after_end))

    def _json_body(self, reader: Reader, output: Output, name: str) -> Steps[None]:
        output.start_call(name)
        yield from read_value(reader, output.arguments)
        yield from reader.take_marker_after_space(markers_of(self.end))

    def _name(self, reader: Reader) -> Steps[tuple[str, bool]]:
        """Returns the name, and whether the call ends with it."""
        yield from reader.space()
        ends = markers_of(self.after_name, *self.closing) if self.after_name else markers_of("\n", "<")
        name = yield from reader.word(ends, MAX_HEADER)
        if not name:
            raise NotACall
        end = (yield from reader.take_marker(ends)) if self.after_name else None
        return name.strip(), end in self.closing

    def _next_tag(self, reader: Reader) -> Steps[str]:
        yield from reader.space()
        tag = yield from reader.peek_marker(markers_of(self.key, self.end, *self.next_tags))
        if tag is None:
            raise NotACall
        if tag not in self.next_tags:
            reader.skip(len(tag))
        return tag

    def _key(self, reader: Reader) -> Steps[tuple[str, bool | None]]:
        ends = markers_of(*self.after_key)
        key = yield from reader.word(ends, MAX_HEADER)
        end = yield from reader.take_marker(ends)
        if key is None or end is None:
            raise NotACall
        if self.value:
            yield from reader.space()
            if (yield from reader.take_marker(markers_of(self.value))) is None:
                raise NotACall
        return key.strip(), self.after_key[end]

    def _stream_string(self, reader: Reader, output: Output) -> Steps[None]:
        output.arguments('"')
        yield from self._read_value(reader, lambda text: output.arguments(escaped(text)))
        output.arguments('"')

    def _read_value(self, reader: Reader, sink: Sink) -> Steps[None]:
        if self.cdata is not None and (yield from reader.take_marker(markers_of(self.cdata[0]))) is not None:
            yield from self._read_cdata(reader, sink, self.cdata[1])
            return
        plain = _Unescaped(sink)
        sink = plain.push if self.escapes else sink
        line_end = _LineEnd(sink)
        no_end = self.no_end[1]
        if self.lines and (yield from reader.peek()) == "\n":
            reader.skip(1)
            no_end = self.no_end[0]
        others = (*no_end, *self.no_value)
        behind = {tag: markers_of(*self.next_tags) for tag in others if tag.strip() == self.end}
        behind[self.after_value] = markers_of(self.key, self.end, *self.next_tags)
        ends = markers_of(self.after_value, *others)
        end = yield from reader.until(ends, line_end.push if self.lines else sink, behind)
        plain.finish()
        if end is None or end in self.no_value:
            raise NotACall
        if end == self.after_value:
            reader.skip(len(end))

    def _read_cdata(self, reader: Reader, sink: Sink, end: str) -> Steps[None]:
        behind = markers_of(self.after_value)
        if (yield from reader.until(markers_of(end), sink, {end: behind})) is None:
            raise NotACall
        reader.skip(len(end))
        if (yield from reader.take_marker_after_space(behind)) is None:
            raise NotACall


class _LineEnd:
    """Passes text on without a line break at its end."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._held = ""

    def push(self, text: str) -> None:
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        self._sink(text.removesuffix("\n"))


_REFERENCE = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{0,31});")
_LONGEST = 34
"""Characters of the longest reference."""


class _Unescaped:
    """Passes text on with the characters that references stand for. Only whole references count, up to their
    semicolon: an `&` in an address or a command stays as it is."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._held = ""

    def push(self, text: str) -> None:
        text = self._held + text
        cut = text.rfind("&")
        if cut < 0 or not _may_go_on(text[cut + 1 :]):
            cut = len(text)
        self._held = text[cut:]
        if cut:
            self._sink(_REFERENCE.sub(_character, text[:cut]))

    def finish(self) -> None:
        """Passes on what began like a reference and is none."""
        text, self._held = self._held, ""
        if text:
            self._sink(text)


def _may_go_on(name: str) -> bool:
    """Returns whether what follows an `&` may be the beginning of a reference."""
    return len(name) < _LONGEST and all(letter == "#" or letter.isalnum() for letter in name)


def _character(reference: re.Match[str]) -> str:
    name = reference[0][1:]
    return html.unescape(reference[0]) if name.startswith("#") or name in html5 else reference[0]
