"""Every format of calls reads values that look like its own syntax, and calls in thoughts, wherever a stream is cut.

`make test` cuts one output of each format, and of each format with one of thoughts, at every offset; `make thorough`
cuts an output for each value, and for each pair of formats.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest

from sglang.srt.function_call.events import ParsedOutput, collect
from sglang.srt.function_call.messages import MessageFormat
from sglang.srt.function_call.parser import OutputParser
from sglang.srt.function_call.reasoning import ReasoningFormat
from sglang.srt.function_call.registry import REASONING_FORMATS, TOOL_CALL_FORMATS
from sglang.srt.function_call.tagged_calls import TaggedCalls
from srt.function_call.outputs import BARE_WRITERS, WRITERS
from srt.function_call.test_chunking import run

TEXT = {"type": "string"}
JOINED_TEXT = {"allOf": [{"$ref": "#/$defs/text"}, {"maxLength": 99_999}]}
EDIT: dict[str, Any] = {
    "type": "object",
    "properties": {
        **{f"text{number}": TEXT if number % 2 else JOINED_TEXT for number in range(20)},
        "any": {},
        "count": {"allOf": [{"minimum": 0}, {"type": "integer"}]},
        "rows": {"type": "array", "items": {"type": "array"}},
        "options": {"type": "object"},
    },
    "$defs": {"text": TEXT},
}
TOOLS = {"edit": EDIT, "now": {}}

FORMATS = [name for name in WRITERS if name != "hermes"]  # as qwen25
MESSAGES = [name for name, form in TOOL_CALL_FORMATS.items() if isinstance(form, MessageFormat)]
THOUGHTS = [name for name, form in REASONING_FORMATS.items() if isinstance(form, ReasoningFormat) and not form.in_text]
_TAG = re.compile(r"(?:\]<\]minimax\[>\[)?</?[^<>\s/][^<>]*>|\[/?[A-Z_]+\]|```(?:json)?|\]\]>")
_QUOTES = (
    '"',
    "'",
    "'a'",
    '"a", "b"',
    'it\'s \\"so\\"',
    "[1]",
    '{"a": 1}',
    "null",
    "5",
    "a, b}",
    "]",
    "</",
    "<![CDATA[",
)
LIKE_JSON = ("[1]", '{"a": 1}', "null", "5")
_STRUCTURES: dict[str, Any] = {
    "any": [["a"], ["b", ["c", 1, True]]],
    "count": 5,
    "rows": [["a"], ["it's", 'a "b"'], []],
    "options": {"a b": 1, "it's": {'q"': ["x", [2, None]]}},
}


def tags(name: str) -> list[str]:
    """What the format writes around values, but for what no value can have in it."""
    written = WRITERS[name].calls([("edit", {"text0": "<", "count": 1})])
    grammar = getattr(TOOL_CALL_FORMATS[name], "grammar", None)
    never: tuple[str, ...] = ()
    if isinstance(grammar, TaggedCalls):
        never = tuple(mark for mark in grammar.no_value if mark != grammar.end)
    if name == "muse":
        never = TOOL_CALL_FORMATS["muse"].markers
    marks = [*dict.fromkeys(_TAG.findall(written)), "</think>", "[/THINK]"]
    return [mark for mark in marks if not mark.startswith(never)]


def texts(name: str) -> list[str]:
    """Values of a text: the format's own tags in the middle, on a line, alone, twice, at the end; quotes."""
    shapes = ["a {0} b", "a\n{0}\nb", "{0}", "{0}{0} c", "a {0}"]
    if name == "qwen3_coder":  # tags that begin a line end a value whose end tag the model has forgotten
        shapes.remove("a\n{0}\nb")
    if name == "minimax-m3":  # an end tag counts before any other tag
        shapes = shapes[:2]
    return [shape.format(mark) for mark in tags(name) for shape in shapes] + list(_QUOTES)


def structures(name: str) -> dict[str, Any]:
    """In MiniMax-M3 values without a type are text where they have no tags."""
    return {key: value for key, value in _STRUCTURES.items() if name != "minimax-m3" or key in ("any", "count")}


def new_parser(name: str, reasoning: str | None = None) -> OutputParser:
    form = TOOL_CALL_FORMATS[name]
    thoughts: Any = form if isinstance(form, MessageFormat) else REASONING_FORMATS.get(reasoning or "")
    return OutputParser(calls=form, tools=TOOLS, reasoning=thoughts)


def read(name: str, text: str, reasoning: str | None = None, cut: bool = True) -> ParsedOutput:
    """What `text` means, which is the same for each place at which it is cut, and cut into characters."""
    whole = run(new_parser(name, reasoning), [text])
    if cut:
        assert run(new_parser(name, reasoning), list(text)) == whole
        for place in range(1, len(text)):
            assert run(new_parser(name, reasoning), [text[:place], text[place:]]) == whole, place
    return collect(whole)


def calls_of(output: ParsedOutput) -> list[Any]:
    return [(call.name, json.loads(call.arguments)) for call in output.calls]


def message(name: str, calls: list[Any]) -> str:
    return WRITERS[name].message("So:", WRITERS[name].calls(calls), "Done.")


@pytest.mark.parametrize("name", FORMATS)
def test_each_value(name: str) -> None:
    for value in texts(name):
        for key in ("text0", "text1", "any"):
            if key == "any" and (value in LIKE_JSON or value.startswith("]<]minimax[>[")):
                continue  # it is read as what it looks like
            for arguments in ({key: value}, {key: value, "text2": "x"}, {"text2": value, key: value, "count": 3}):
                calls = [("edit", arguments), ("now", {})]
                output = read(name, message(name, calls), cut=False)
                assert (calls_of(output), output.text) == (calls, "So:Done."), value


@pytest.mark.parametrize("name", FORMATS)
def test_values_in_a_stream_that_is_cut_anywhere(name: str) -> None:
    end_tags = [tag for tag in tags(name) if "/" in tag]
    values = [*(f"a {tag}\tb" for tag in end_tags[:2]), "'a'"]
    arguments = {f"text{number}": value for number, value in enumerate(values)} | structures(name)
    del arguments["any"]
    output = read(name, message(name, [("edit", arguments), ("now", {})]))
    assert (calls_of(output), output.text) == ([("edit", arguments), ("now", {})], "So:Done.")


@pytest.mark.thorough
@pytest.mark.parametrize("name", FORMATS)
def test_each_value_in_a_stream_that_is_cut_anywhere(name: str) -> None:
    for value in texts(name):
        calls = [("edit", {"text0": value, "count": 3, "text1": value}), ("now", {})]
        output = read(name, message(name, calls))
        assert (calls_of(output), output.text) == (calls, "So:Done."), value


# --- calls and thoughts -----------------------------------------------------------------------------------------------


def pairs() -> list[Any]:
    """Each format of calls with one of thoughts, and each of thoughts; the others are thorough."""
    quick = set(zip(FORMATS, itertools.cycle(THOUGHTS), strict=False))
    return [
        pytest.param(*pair, id="-".join(pair), marks=() if pair in quick else pytest.mark.thorough)
        for pair in itertools.product([name for name in FORMATS if name not in MESSAGES], THOUGHTS)
    ]


@pytest.mark.parametrize(("name", "reasoning"), pairs())
def test_calls_in_thoughts_that_never_end(name: str, reasoning: str) -> None:
    begin, end = REASONING_FORMATS[reasoning].thought_marks
    calls = [("edit", {"text0": f"a {end} b", "count": 2}), ("now", {})]
    output = read(name, f"{begin}I look.\n{WRITERS[name].calls(calls)}", reasoning)
    assert (output.reasoning, output.text, calls_of(output)) == ("I look.", "", calls)


@pytest.mark.parametrize(("name", "reasoning"), pairs())
def test_calls_in_thoughts_that_end(name: str, reasoning: str) -> None:
    begin, end = REASONING_FORMATS[reasoning].thought_marks
    thoughts = f"First {WRITERS[name].calls([('now', {})])} and then"
    output = read(name, f"{begin}{thoughts}{end}Yes.", reasoning)
    assert (output.reasoning, output.text, calls_of(output)) == (thoughts, "Yes.", [])
    output = read(name, f"{begin}{thoughts}{end}{WRITERS[name].calls([('now', {})])}", reasoning, cut=False)
    assert (output.reasoning, output.text, calls_of(output)) == (thoughts, "", [("now", {})])
    for mark in WRITERS[name].markers:
        output = read(name, f"{begin}First {mark} and then{end}Yes.", reasoning, cut=False)
        assert (output.reasoning, output.text, calls_of(output)) == (f"First {mark} and then", "Yes.", [])


@pytest.mark.parametrize("name", MESSAGES)
def test_calls_in_messages_behind_thoughts_that_never_end(name: str) -> None:
    form = TOOL_CALL_FORMATS[name]
    assert isinstance(form, MessageFormat)
    calls = [("edit", {"text0": "a </think> b", "count": 2}), ("now", {})]
    output = read(name, f"{form.thought_marks[0]}I look.{WRITERS[name].calls(calls)}")
    assert (output.reasoning, output.text, calls_of(output)) == ("I look.", "", calls)


@pytest.mark.parametrize("reasoning", THOUGHTS)
@pytest.mark.parametrize("name", ["gemma4", "llama3", "pythonic"])
def test_calls_without_a_mark_right_behind_thoughts(name: str, reasoning: str) -> None:
    begin, end = REASONING_FORMATS[reasoning].thought_marks
    calls = [("edit", {"count": 2}), ("now", {})]
    bare = {**BARE_WRITERS, "gemma4": lambda calls: "call:edit{count:2}<tool_call|>call:now{}<tool_call|>"}
    output = read(name, f"{begin}I look.{end}{bare[name](calls)}", reasoning)
    assert (output.reasoning, output.text, calls_of(output)) == ("I look.", "", calls)
