"""A client's schema is evaluated once for an output, however many arguments the model writes."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from sglang.srt.function_call.events import collect
from sglang.srt.function_call.known_schemas import KnownSchemas
from sglang.srt.function_call.output import MAX_HEADER
from sglang.srt.function_call.parser import OutputParser
from sglang.srt.function_call.reader import Markers
from sglang.srt.function_call.registry import TOOL_CALL_FORMATS
from srt.function_call.counted_values import Values
from srt.function_call.outputs import WRITERS
from srt.function_call.test_chunking import run

FORMATS = [name for name in WRITERS if name in ("minimax-m2", "minimax-m3", "gemma4", "glm45", "qwen3_coder", "step3")]


def num_read(name: str, calls: list[Any], schema: dict[str, Any]) -> int:
    """How many values of enums are read for an output with these calls."""
    Values.num_read = 0
    text = WRITERS[name].calls(calls)
    parsed = collect(run(OutputParser(calls=TOOL_CALL_FORMATS[name], tools={"f": schema}), [text]))
    assert [json.loads(call.arguments) for call in parsed.calls] == [arguments for _, arguments in calls]
    return Values.num_read


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("place", ["properties", "additionalProperties"])
def test_many_calls_evaluate_a_schema_once(name: str, place: str) -> None:
    wanted = {"enum": Values(["a", "b"] * 100)}
    declared = {f"k{number}": {"anyOf": [wanted] * 8} for number in range(3)}
    schema = {"type": "object", place: declared if place == "properties" else {"anyOf": [wanted] * 8}}
    few = num_read(name, [("f", {"k0": "a", "k1": "b"})], schema)
    many = num_read(name, [("f", {f"k{number % 3}": "a", f"k{number % 3 + 1}": "b"}) for number in range(50)], schema)
    assert few == many <= 200


def test_many_entries_evaluate_a_schema_once() -> None:
    """Also those of a schema that contains itself, and of many objects in an array."""
    row = {"type": "object", "properties": {"a": {"enum": Values(["x", "y"] * 100)}, "b": {"$ref": "#/$defs/row"}}}
    schema = {"properties": {"rows": {"type": "array", "items": {"$ref": "#/$defs/row"}}}, "$defs": {"row": row}}

    def read(count: int) -> int:
        deep: dict[str, Any] = {"a": "x"}
        for _ in range(min(count, 20)):
            deep = {"a": "y", "b": deep}
        return num_read("minimax-m3", [("f", {"rows": [{"a": "x"}] * count + [deep]})], schema)

    assert read(2) == read(200)


def test_a_level_is_found_again() -> None:
    known = KnownSchemas()
    row: dict[str, Any] = {"properties": {"b": {"$ref": "#/$defs/row"}}}
    top = known.level([{"properties": {"a": row}, "$defs": {"row": row}}], {})
    deep = top.below("a").below("b").below("b")
    assert deep is top.below("a").below("b").below("b").below("b")


def test_markers_take_memory_like_their_texts() -> None:
    """They are kept for every argument of a call, whose name the model chooses."""
    name = "a" * MAX_HEADER
    Markers(f"</{name}b>", "<other>")  # what compiling the first one leaves behind is no memory of the next
    tracemalloc.start()
    try:
        markers = Markers(f"</{name}>", "<other>")
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size < 40 * MAX_HEADER
    assert markers.safe_end("text </aa", 0, 9) == 5 and markers.may_begin("<oth", 0, 4)
    assert markers.safe_end("text </ab", 0, 9) == 9 and not markers.may_begin("<other>", 0, 7)
