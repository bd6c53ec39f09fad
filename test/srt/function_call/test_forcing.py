"""What a forced grammar lets a model write is what the format's parser reads."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import xgrammar

from sglang.srt.constrained import llguidance_backend
from sglang.srt.function_call.forcing import FORCED_CALLS, after_thoughts, answer_format, as_message
from sglang.srt.function_call.messages import MessageFormat
from sglang.srt.function_call.parser import parse
from sglang.srt.function_call.registry import REASONING_FORMATS, TOOL_CALL_FORMATS
from sglang.srt.function_call.tagged_arguments import MAX_PARAMETERS
from sglang.srt.sampling.limits import MAX_GRAMMAR_LENGTH
from srt.function_call.outputs import MESSAGE_FORMATS, WRITERS
from srt.function_call.test_chunking import new_parser

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = {"get_weather": SCHEMA, "now": {"type": "object", "properties": {}, "additionalProperties": False}}
END_ID = 256
BYTES = xgrammar.TokenizerInfo(
    [bytes((value,)) for value in range(256)] + [b"</s>"], xgrammar.VocabType.RAW, vocab_size=257, stop_token_ids=[256]
)


def accepts(form: dict[str, Any], text: str) -> bool:
    """Whether the whole of `text` is a text of the structural tag."""
    return is_text_of(compiled(form), text)


def compiled(form: dict[str, Any]) -> xgrammar.CompiledGrammar:
    tag = form if form["type"] == "structural_tag" else {"type": "structural_tag", "format": form}
    return xgrammar.GrammarCompiler(BYTES, max_threads=1).compile_structural_tag(json.dumps(tag))


def is_text_of(grammar: xgrammar.CompiledGrammar, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar)
    return all(map(matcher.accept_token, text.encode())) and matcher.accept_token(END_ID)


def written(name: str, *calls: tuple[str, dict[str, Any]]) -> str:
    """Calls as the forced grammar of the format has them."""
    text = WRITERS[name].calls(list(calls))
    if name == "gpt-oss":
        return text.removeprefix("<|start|>assistant").removesuffix("<|call|>")
    if name == "muse":
        return text.removeprefix("<|start|>assistant").removesuffix("<|eom|>")
    if name == "inkling":
        return text.removeprefix("<|message_model|>")
    return text.removeprefix("<|python_tag|>")


WEATHER = ("get_weather", {"city": "東京 5", "days": 3})


def test_which_formats_can_be_forced() -> None:
    without = {"gemma4", "gigachat35", "hunyuan-opensource", "hy_v4", "lfm2", "minicpm5", "pythonic"}
    assert set(FORCED_CALLS) == set(TOOL_CALL_FORMATS) - without


@pytest.mark.parametrize("name", FORCED_CALLS)
def test_forced_calls(name: str) -> None:
    form = FORCED_CALLS[name].at_least_one(TOOLS, one=False)
    text = written(name, WEATHER)
    assert accepts(form, text)
    (call,) = parse(new_parser(name), text).calls
    assert (call.name, json.loads(call.arguments)) == WEATHER
    assert not accepts(form, "Hello") and not accepts(form, "")
    assert not accepts(form, written(name, ("unknown", {})))
    assert not accepts(form, written(name, ("get_weather", {"city": "x", "days": "many"})))
    if name != "gpt-oss":
        two = written(name, WEATHER, ("now", {}))
        assert accepts(form, two) and not accepts(FORCED_CALLS[name].at_least_one(TOOLS, one=True), two)


@pytest.mark.parametrize("name", FORCED_CALLS)
def test_strict_calls_among_text(name: str) -> None:
    form = FORCED_CALLS[name].among_text(TOOLS, one=False)
    assert accepts(form, "Hello. " + written(name, WEATHER)) and accepts(form, "Hello.")
    assert not accepts(form, written(name, ("get_weather", {"city": "x", "days": "many"})))


@pytest.mark.parametrize("name", [name for name in REASONING_FORMATS if name not in MESSAGE_FORMATS])
def test_the_grammar_begins_after_thoughts(name: str) -> None:
    reasoning = REASONING_FORMATS[name]
    begin, end = reasoning.markers
    answer = answer_format("json_schema", {"type": "integer"})
    assert answer is not None
    inside = after_thoughts(answer, reasoning, f"prompt{begin}\n")
    assert accepts(inside, f"well {{\n{end}\n\n5") and not accepts(inside, f"well {end}x") and not accepts(inside, "5")
    outside = after_thoughts(answer, reasoning, f"prompt{begin}\n\n{end}\n\n")
    assert accepts(outside, "5") and not accepts(outside, f"{begin}well{end}5")
    if not reasoning.starts_inside("prompt"):
        either = after_thoughts(answer, reasoning, "prompt")
        assert accepts(either, "5") and accepts(either, f"{begin}\nwell\n{end}\n\n5") and not accepts(either, "well")


@pytest.mark.parametrize("name", FORCED_CALLS)
def test_calls_or_an_answer(name: str) -> None:
    answer = answer_format("json_schema", {"type": "object", "properties": {"x": {"type": "integer"}}})
    form = {"type": "or", "elements": [FORCED_CALLS[name].at_least_one(TOOLS, one=False), answer]}
    assert accepts(form, written(name, WEATHER)) and accepts(form, '{"x": 1}') and not accepts(form, "Hello")


TAGGED = ("muse", "step3")
MANY = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["C", "F"]},
        "place": {"$ref": "#/$defs/place"},
        "note": {"type": ["string", "null"]},
        "days": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["unit", "days"],
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}


@pytest.mark.parametrize("name", TAGGED)
def test_tagged_arguments(name: str) -> None:
    """Optional ones, values of a list, references, text beside others, and arguments that no schema names."""
    form = FORCED_CALLS[name].at_least_one({"f": MANY, "g": {"type": "object"}}, one=False)
    for arguments in (
        {"unit": "F", "days": [1, 2]},
        {"unit": "C", "place": {"x": 1.5}, "note": "a < b", "days": []},
        {"unit": "C", "note": "5", "days": [3]},
    ):
        text = written(name, ("f", arguments))
        assert accepts(form, text), text
    for wrong in ({"days": []}, {"unit": "K", "days": []}, {"unit": "C", "place": {"y": 1}, "days": []}, {}):
        assert not accepts(form, written(name, ("f", wrong))), wrong
    assert accepts(form, written(name, ("g", {"any": "thing", "else": "2"}), ("f", {"unit": "C", "days": [1]})))
    assert accepts(form, written(name, ("g", {})))


@pytest.mark.parametrize("name", TAGGED)
def test_tagged_arguments_for_the_other_library(name: str) -> None:
    tag = {"type": "structural_tag", "format": FORCED_CALLS[name].at_least_one({"f": MANY}, one=True)}
    lark, subgrammars, dead_rule = llguidance_backend._structural_tag(json.dumps(tag))
    assert lark.startswith("start: ") and len(subgrammars) == 2 and dead_rule is None, "schemas of place and days"


@pytest.mark.parametrize("name", TAGGED)
def test_definitions_are_copied_where_they_are_referred_to(name: str) -> None:
    """In a total that a grammar may have."""
    long = {"$defs": {"place": {"type": "string", "description": "x" * 50_000}}}
    plain = {f"p{i}": {"type": "integer"} for i in range(4_000)}
    form = FORCED_CALLS[name].at_least_one({"f": {"properties": plain, "required": list(plain), **long}}, one=True)
    assert len(json.dumps(form)) < 10_000_000
    few, many = ({f"p{i}": {"items": {"$ref": "#/$defs/place"}, "type": "array"} for i in range(n)} for n in (3, 60))
    assert json.dumps(FORCED_CALLS[name].at_least_one({"f": {"properties": few, **long}}, one=True)).count("xxx") > 3
    with pytest.raises(ValueError, match="60 parameters of a function refer to definitions"):
        FORCED_CALLS[name].at_least_one({"f": {"properties": many, **long}}, one=True)


@pytest.mark.parametrize("name", TAGGED)
def test_more_parameters_than_a_grammar_can_have_are_not_written(name: str) -> None:
    def functions(count: int, parameters: int) -> dict[str, Any]:
        properties = {f"p{i}": {"type": "string"} for i in range(parameters)}
        return {f"f{i}": {"properties": properties} for i in range(count)}

    forced = FORCED_CALLS[name]
    least = forced.at_least_one(functions(1, MAX_PARAMETERS), one=True)
    assert len(msgspec.json.encode(least)) > MAX_GRAMMAR_LENGTH, "none that could be served is refused"
    for write in (forced.at_least_one, forced.among_text):
        with pytest.raises(ValueError, match=f"at most {MAX_PARAMETERS} are allowed; offer fewer"):
            write(functions(128, MAX_PARAMETERS // 100), one=False)


def test_muse_thinks_before_a_forced_call() -> None:
    form = after_thoughts(FORCED_CALLS["muse"].at_least_one(TOOLS, one=True), REASONING_FORMATS["muse"], "assistant")
    text = " to=self<|message|>well<|eom|><|start|>assistant" + written("muse", WEATHER)
    assert accepts(form, text)
    output = parse(new_parser("muse"), text)
    assert output.reasoning == "well" and [call.name for call in output.calls] == ["get_weather"]


def test_inkling_thinks_before_a_forced_call() -> None:
    form = FORCED_CALLS["inkling"].at_least_one(TOOLS, one=False)
    form = after_thoughts(form, REASONING_FORMATS["inkling"], "<|message_model|>")
    text = "<|content_thinking|>well<|end_message|><|message_model|>" + written("inkling", WEATHER, ("now", {}))
    assert accepts(form, text) and not accepts(form, f"{text}<|message_model|><|content_text|>done")
    output = parse(new_parser("inkling"), text)
    assert output.reasoning == "well" and [call.name for call in output.calls] == ["get_weather", "now"]


def test_white_space_is_bounded() -> None:
    for form in (answer_format("json_schema", SCHEMA), FORCED_CALLS["mistral"].at_least_one(TOOLS, one=True)):
        assert form is not None
        begin = "" if form["type"] == "json_schema" else "[TOOL_CALLS]get_weather[ARGS]"
        assert accepts(form, begin + '{"city": "x",' + " " * 20 + '"days": 1}')
        assert not accepts(form, begin + '{"city": "x",' + " " * 200 + '"days": 1}')


def test_harmony_thinks_before_a_forced_call() -> None:
    form = after_thoughts(
        FORCED_CALLS["gpt-oss"].at_least_one(TOOLS, one=False), REASONING_FORMATS["gpt-oss"], "<|start|>assistant"
    )
    text = "<|channel|>analysis<|message|>well<|end|><|start|>assistant" + written("gpt-oss", WEATHER)
    assert accepts(form, text)
    output = parse(new_parser("gpt-oss"), text)
    assert output.reasoning == "well" and [call.name for call in output.calls] == ["get_weather"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gpt-oss", "<|channel|>analysis<|message|>well<|end|><|start|>assistant<|channel|>final<|message|>5"),
        ("muse", " to=self<|message|>well<|eom|><|start|>assistant to=user<|message|>5"),
        ("inkling", "<|content_thinking|>well<|end_message|><|message_model|><|content_text|>5"),
    ],
)
def test_a_constrained_answer_is_a_message(name: str, text: str) -> None:
    answer, messages = answer_format("json_schema", {"type": "integer"}), REASONING_FORMATS[name]
    assert answer is not None and isinstance(messages, MessageFormat)
    form = after_thoughts(as_message(answer, messages), messages, "<|start|>assistant")
    assert accepts(form, text) and not accepts(form, "5")
    assert accepts(form, text.partition(messages.next_message)[2]), "without thoughts"
    output = parse(new_parser(name), text)
    assert output.text == "5" and output.reasoning == "well"


def test_grammars_as_parts_of_a_structural_tag() -> None:
    for kind, source, good, bad in (
        ("json_schema", {"type": "integer"}, "5", "x"),
        ("regex", "a+", "aa", "b"),
        ("ebnf", 'root ::= "yes" | "no"', "no", "maybe"),
        ("structural_tag", {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}, "x", "y"),
    ):
        form = answer_format(kind, source)
        assert form is not None and accepts(form, good) and not accepts(form, bad)
    assert answer_format("structural_tag", {"structures": [], "triggers": []}) is None
