"""Functions and arguments of any name are called in a format as it is written there, or the request is refused."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest

from sglang.srt.entrypoints.http_errors import ApiError
from sglang.srt.entrypoints.openai.chat_call import check_tools
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, NamedToolChoice
from sglang.srt.function_call import names as names_module
from sglang.srt.function_call.forcing import FORCED_CALLS
from sglang.srt.function_call.names import MAX_TRIED, check_argument_names, check_function_names, tagged_names
from sglang.srt.function_call.parser import OutputParser, parse
from sglang.srt.function_call.registry import TOOL_CALL_FORMATS
from srt.function_call.outputs import MESSAGE_FORMATS, WRITERS
from srt.function_call.test_forcing import accepts, compiled, is_text_of, written

PLAIN = ("a.b", "mcp:x/y", "a-b", "mcp__server__tool", "functions.f", "a:1", "1", "x" * 256, "ä", "🗼", "हिन्दी", "item")
"""Names that every format has a form for."""
UNUSUAL = (
    'a"b', "a\\b", "a\nb", "a<b>", "a]b", "a'b", "", " a", "a b", "NAME", "ESCAPED", "x" * 600, "user", "self",
    "user b", 'a">b', "$a", "@a", "a[b]", "a:b c", "\u00a0a", "a\r", "a\x00b", "\u2028", "</arg_key>", "/invoke",
    "a>b", "a｜b",
)  # fmt: skip
JSON_FORMATS = ("apertus2509", "gigachat3", "hermes", "interns1", "llama3", "qwen25")
"""Formats with the name in a JSON string and nowhere else."""
TAGGED_FORMATS = tuple(name for name, forced in FORCED_CALLS.items() if forced.has_tags)
WORD = {"type": "string"}
SCHEMA = {"type": "object", "properties": {"x": WORD}, "required": ["x"], "additionalProperties": False}
ARGUMENTS = {"x": "v"}


def is_read(form: str, name: str, schema: dict[str, Any] = SCHEMA, arguments: dict[str, Any] = ARGUMENTS) -> bool:
    calls, call = TOOL_CALL_FORMATS[form], (name, arguments)
    reasoning = calls if form in MESSAGE_FORMATS else None
    text = written(form, call) if form in FORCED_CALLS else WRITERS[form].calls([call])
    output = parse(OutputParser(calls=calls, tools={name: schema}, reasoning=reasoning), text)  # type: ignore[arg-type]
    return not output.text and [(call.name, json.loads(call.arguments)) for call in output.calls] == [(name, arguments)]


def with_argument(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: WORD}, "required": [name], "additionalProperties": False}


def takes_function(form: str, name: str) -> bool:
    try:
        check_function_names(form, [name])
    except ValueError:
        return False
    return True


def takes_argument(form: str, name: str) -> bool:
    try:
        check_argument_names(form, tagged_names(form, with_argument(name)))
    except ValueError:
        return False
    return True


def request(
    name: str, parameters: dict[str, Any] = SCHEMA, strict: bool = False, **options: Any
) -> ChatCompletionRequest:
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}]
    return ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], tools=tools, **options)


@pytest.mark.parametrize("form", TOOL_CALL_FORMATS)
def test_names_are_read_or_refused(form: str) -> None:
    check_function_names(form, PLAIN)
    for name in PLAIN + UNUSUAL:
        assert takes_function(form, name) == is_read(form, name), name[:64]


@pytest.mark.parametrize("form", FORCED_CALLS)
def test_grammars_have_names_as_they_are_written(form: str) -> None:
    names = [name for name in PLAIN + UNUSUAL if takes_function(form, name)]
    for grammar in (FORCED_CALLS[form].at_least_one, FORCED_CALLS[form].among_text):
        calls = compiled(grammar(dict.fromkeys(names, SCHEMA), one=True))
        for name in names:
            assert is_text_of(calls, written(form, (name, ARGUMENTS))), name
        assert not is_text_of(calls, written(form, (names[0], {"x": 5, "y": 5})))


@pytest.mark.parametrize("form", TAGGED_FORMATS)
def test_arguments_are_read_or_refused(form: str) -> None:
    check_argument_names(form, PLAIN)
    taken = [name for name in PLAIN + UNUSUAL if takes_argument(form, name)]
    for name in PLAIN + UNUSUAL:
        assert (name in taken) == is_read(form, "f", with_argument(name), {name: "v"}), name[:64]
    schema = {"type": "object", "properties": dict.fromkeys(taken, WORD), "required": taken}
    text = written(form, ("f", dict.fromkeys(taken, "v")))
    assert accepts(FORCED_CALLS[form].at_least_one({"f": schema}, one=True), text)


@pytest.mark.parametrize("form", JSON_FORMATS)
def test_json_has_every_name(form: str) -> None:
    check_function_names(form, PLAIN + UNUSUAL)
    assert not list(tagged_names(form, with_argument("a\nb")))


@pytest.mark.parametrize("count", [30, pytest.param(1000, marks=pytest.mark.thorough)])
def test_names_of_one_shape_are_read_alike(count: int) -> None:
    """What is tried stands for all names of its shape."""
    rng = random.Random(count)
    pieces = ["a", "self", "user", "9", "é", *" $\"'\\[](){},;:./<>=`|-", '">', "to=", "x{", "<|", ":0"]
    for form in TOOL_CALL_FORMATS:
        for _ in range(count):
            name = "".join(rng.choices(pieces, k=rng.randrange(1, 6)))
            assert takes_function(form, name) == is_read(form, name), (form, name)
            if form in TAGGED_FORMATS:
                assert takes_argument(form, name) == is_read(form, "f", with_argument(name), {name: "v"}), (form, name)


def test_only_a_few_names_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(names_module, "_reads_function", lambda *call: tried.append(call) or True)
    check_function_names("qwen3_coder", [f"tool{i}" for i in range(4096)])
    assert not tried
    check_function_names("qwen3_coder", [f"my tool ${i}" for i in range(4096)])
    assert set(tried) == {("qwen3_coder", "x x $x")}
    with pytest.raises(ValueError, match=f"more than {MAX_TRIED} names"):
        check_function_names("qwen3_coder", ["$" * i for i in range(1, MAX_TRIED + 2)])


def test_names_in_nested_tags_count() -> None:
    inner = {"type": "object", "properties": {"a<b": WORD}}
    schema = {"properties": {"list": {"items": {"$ref": "#/$defs/entry"}}}, "$defs": {"entry": inner}}
    assert list(tagged_names("minimax-m3", schema)) == ["list", "a<b"]
    assert list(tagged_names("minimax-m2", schema)) == ["list"]
    assert list(tagged_names("glm45", {"$ref": "#/$defs/entry", "$defs": {"entry": inner}})) == ["a<b"]
    loop = {"properties": {"a": {"$ref": "#"}}}
    assert list(tagged_names("minimax-m3", loop)) == ["a"]


def test_a_request_with_a_name_that_cannot_be_written() -> None:
    with pytest.raises(ApiError, match=r"function name 'a\\nb' cannot be written in calls like mistral's") as error:
        check_tools("mistral", request("a\nb"))
    assert error.value.status == 400 and "up to 256 letters" in error.value.message
    for calls_name in ("hermes", None):
        check_tools(calls_name, request("a\nb"))
    check_tools("mistral", request("a\nb", tool_choice="none"))


def test_a_request_with_an_argument_that_cannot_be_written() -> None:
    """It counts where a grammar has it."""
    parameters = with_argument("a>b")
    named = {"function": {"name": "f"}}
    for options in (
        {"tool_choice": "required"},
        {"strict": True},
        {"tool_choice": msgspec.convert(named, NamedToolChoice)},
    ):
        with pytest.raises(ApiError, match="the parameter 'a>b' cannot be written in calls like qwen3_coder's"):
            check_tools("qwen3_coder", request("f", parameters, **options))
        check_tools("hermes", request("f", parameters, **options))
    check_tools("qwen3_coder", request("f", parameters))
