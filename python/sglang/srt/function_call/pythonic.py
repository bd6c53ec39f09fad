"""Reader of a call in Python's syntax: `f(a=1, b="x")`."""

from __future__ import annotations

from sglang.srt.function_call.json_text import escaped, expect
from sglang.srt.function_call.output import MAX_HEADER, NotACall, Output, SkippedCall
from sglang.srt.function_call.python_text import read_literal
from sglang.srt.function_call.reader import Markers, Reader, Steps, ignore

_NAME_END = Markers("(", "\n", "[", "{", '"', "'", ",", "]")
_KEY_END = Markers("=", "\n", "(", "[", "{", '"', "'", ",", ")")


def read_call(reader: Reader, output: Output) -> Steps[None]:
    """Reads a call, passing its arguments on as JSON. Raises NotACall for other text."""
    name = yield from reader.word(_NAME_END, MAX_HEADER)
    if name is None or (yield from reader.peek()) != "(":
        raise NotACall
    reader.skip(1)
    is_known = name.strip() in output.tools
    if is_known:
        output.start_call(name.strip())
    sink = output.arguments if is_known else ignore
    separator = "{"
    while (yield from reader.space()) != ")":
        key = yield from reader.word(_KEY_END, MAX_HEADER)
        if not key:
            raise NotACall
        yield from expect(reader, "=")
        sink(f'{separator}"{escaped(key.strip())}": ')
        separator = ", "
        yield from reader.space()
        yield from read_literal(reader, sink)
        following = yield from reader.space()
        if following == ",":
            reader.skip(1)
        elif following != ")":
            raise NotACall
    reader.skip(1)
    sink("{}" if separator == "{" else "}")
    if not is_known:
        raise SkippedCall
