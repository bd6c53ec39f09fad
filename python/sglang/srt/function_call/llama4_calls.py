"""Reader of Llama 4's calls: in Python's syntax, or as the JSON objects that its own chat template writes."""

from __future__ import annotations

from sglang.srt.function_call.call_format import one_of_row, row_in_brackets
from sglang.srt.function_call.json_calls import BETWEEN_BARE_CALLS, read_call_object
from sglang.srt.function_call.output import Output
from sglang.srt.function_call.pythonic import read_call
from sglang.srt.function_call.reader import Markers, Reader, Steps, ignore

_END = Markers("<|python_end|>")


def llama4_calls(reader: Reader, output: Output) -> Steps[None]:
    """Reads `[f(a=1, b="x"), g()]`, or `{"name": ..., "parameters": {...}}` once or several times, before the end mark,
    which may be missing. The template writes the marks with nothing between them, and the objects after them."""
    yield from reader.take_marker_after_space(_END)
    if (yield from reader.space()) != "{":
        yield from row_in_brackets(reader, output, read_call)
    else:
        yield from one_of_row(reader, output, read_call_object)
        while (yield from reader.run(BETWEEN_BARE_CALLS, ignore)) == "{":
            yield from one_of_row(reader, output, read_call_object)
    yield from reader.take_marker_after_space(_END)
