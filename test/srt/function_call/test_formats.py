"""What outputs of each format mean."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from sglang.srt.function_call.events import ArgumentsDelta, CallStart, ParsedOutput, TextDelta
from sglang.srt.function_call.parser import OutputParser, parse
from sglang.srt.function_call.registry import REASONING_FORMATS, TOOL_CALL_FORMATS
from srt.function_call.outputs import (
    BARE_WRITERS,
    MESSAGE_FORMATS,
    TOOLS,
    WRITERS,
    Call,
    random_call,
    random_text,
    writable,
)
from srt.function_call.test_chunking import new_parser

WEATHER: Call = ("get_weather", {"city": "Zürich", "days": 3})


def calls_of(output: ParsedOutput) -> list[Call]:
    return [(call.name, json.loads(call.arguments)) for call in output.calls]


def read(name: str, text: str) -> ParsedOutput:
    return parse(new_parser(name), text)


def test_every_format_has_a_writer() -> None:
    assert {name.partition(":")[0] for name in WRITERS} == set(TOOL_CALL_FORMATS)


@pytest.mark.parametrize("name", WRITERS)
def test_what_is_written_is_read(name: str) -> None:
    """Text before, between and after calls; arguments with any JSON in them."""
    rng, writer = random.Random(name), WRITERS[name]
    for _ in range(300):
        rows = [[random_call(rng) for _ in range(rng.randrange(1, 4))] for _ in range(rng.randrange(1, 3))]
        rows = [[writable(name, call) for call in row] for row in rows]
        texts = [random_text(rng) for _ in range(len(rows) + 1)]
        if name in ("llama3", "pythonic"):
            texts = [text if text[:1] not in ("{", "[") else "" for text in texts]
        output = "".join(writer.message(text, writer.calls(row), "") for text, row in zip(texts, rows, strict=False))
        output = writer.message("", output, texts[-1])
        result = read(name, output)
        assert calls_of(result) == [call for row in rows for call in row]
        assert result.text == "".join(texts)


@pytest.mark.parametrize("name", BARE_WRITERS)
def test_other_forms_of_the_same_calls(name: str) -> None:
    rng = random.Random(name)
    for _ in range(200):
        calls = [WEATHER, random_call(rng)]
        before = "" if name in MESSAGE_FORMATS else "\n"
        assert calls_of(read(name, before + BARE_WRITERS[name](calls))) == calls
    if name in ("llama3", "pythonic"):
        assert read(name, "Well: " + BARE_WRITERS[name]([WEATHER])).calls == []


@pytest.mark.parametrize("name", WRITERS)
def test_arguments_stream(name: str) -> None:
    """The call is announced before its arguments, which come in many pieces."""
    text = WRITERS[name].calls([("get_weather", {"city": "Llanfairpwllgwyngyll " * 5})])
    parser = new_parser(name)
    events = [event for character in text for event in parser.push(character)]
    assert isinstance(events[0], CallStart)
    assert sum(isinstance(event, ArgumentsDelta) for event in events) > 50


@pytest.mark.parametrize("name", WRITERS)
def test_function_that_the_request_does_not_offer(name: str) -> None:
    text = WRITERS[name].calls([("unknown", {"a": 1})])
    output = read(name, text)
    assert output.calls == [] and "unknown" in output.text
    if name not in MESSAGE_FORMATS:
        assert output.text == text
    both = WRITERS[name].calls([("unknown", {"a": 1}), WEATHER])
    if name not in ("llama3", "pythonic"):
        assert calls_of(read(name, both)) == [WEATHER]


@pytest.mark.parametrize("name", WRITERS)
def test_no_part_of_a_marker_is_seen(name: str) -> None:
    parser, shown = new_parser(name), ""
    text = WRITERS[name].calls([WEATHER])
    for character in text:
        shown += "".join(event.text for event in parser.push(character) if isinstance(event, TextDelta))
    assert shown == ""


@pytest.mark.parametrize("name", WRITERS)
def test_without_tools_everything_is_text(name: str) -> None:
    if name in MESSAGE_FORMATS:
        return
    text = WRITERS[name].message(" so: ", WRITERS[name].calls([WEATHER]), "\n")
    parser = OutputParser(calls=TOOL_CALL_FORMATS[name], tools={})
    assert parse(parser, text).text == text


BROKEN = {
    "qwen25": (
        '<tool_call>\n{"name": "now", "arguments": {"a": }}\n</tool_call>',
        '<tool_call>\n{"name": "now", "arguments": "x"',
        "<tool_call>\n{'name': 'now'}\n</tool_call>",
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": [1}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": ' + '{"a":' * 5000,
        "<tool_call>" * 50,
        "</tool_call>",
    ),
    "glm45": ("<tool_call>\n</tool_call>", "<tool_call>now\n<arg_key>a</arg_key>\nb</tool_call>", "<tool_call>now x"),
    "kimi_k2": (
        "<|tool_calls_section_begin|>none<|tool_calls_section_end|>",
        "<|tool_call_begin|>functions.now:0<|tool_call_end|>",
    ),
    "qwen3_coder": ("<tool_call>\n<function=now>\n<parameter=a>\nx", "<tool_call>\n<function>\n"),
    "pythonic": ("[now(1)]", "[now(a=[1, 2)]", '[now(a="\\ud800")]', "[now(a=b)]", "[now", "[1]"),
    "mistral": ("[TOOL_CALLS][1]", "[TOOL_CALLS]now{}", '[TOOL_CALLS][{"name": "now", "arguments": {"a": 1'),
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in BROKEN.items() for text in texts])
def test_broken_calls_are_text(name: str, text: str) -> None:
    output = read(name, text)
    assert output.calls == [] and output.text == text


def test_long_broken_output_takes_linear_time() -> None:
    """Each character is looked at a bounded number of times: far below a second here, minutes if it were squared."""
    for text in ("<tool_call>" * 50_000, '<tool_call>{"arguments": {"a": "' * 20_000, " \n" * 300_000, "<" * 500_000):
        assert read("qwen25", text).text == text


def test_line_breaks_in_strings_are_escaped() -> None:
    output = read("qwen25", '<tool_call>{"name": "now", "arguments": {"a": "x\ny"}}</tool_call>')
    assert calls_of(output) == [("now", {"a": "x\ny"})]


def test_arguments_before_the_name() -> None:
    output = read("qwen25", '<tool_call>{"id": [1], "parameters": {"a": 1}, "name": "now"}</tool_call>')
    assert calls_of(output) == [("now", {"a": 1})]
    assert calls_of(read("qwen25", '<tool_call>{"name": "now"}</tool_call>')) == [("now", {})]


def test_values_become_what_the_schema_says() -> None:
    def value(text: str, schema: Any) -> Any:
        tools = {"f": {"properties": {"a": schema}}}
        parser = OutputParser(calls=TOOL_CALL_FORMATS["glm47"], tools=tools)
        (call,) = parse(parser, f"<tool_call>f<arg_key>a</arg_key><arg_value>{text}</arg_value></tool_call>").calls
        return json.loads(call.arguments)["a"]

    assert value("5", {"type": "string"}) == "5"
    assert value("5", {"type": "integer"}) == 5
    assert value("12345678901234567890123", {"type": "integer"}) == 12345678901234567890123
    assert value("5.0", {"type": "integer"}) == 5 and value("5.5", {"type": "integer"}) == "5.5"
    assert value("five", {"type": "integer"}) == "five"
    assert value("True", {"type": "boolean"}) is True
    assert value("None", {"type": ["string", "null"]}) is None
    assert value("5", {"type": ["string", "null"]}) == "5"
    assert value("5", {"anyOf": [{"type": "integer"}, {"type": "string"}]}) == 5
    assert value('{"b": [1]}', {"type": "object"}) == {"b": [1]}
    assert value("5", {"enum": ["5", "6"]}) == "5"
    assert value("5", None) == 5 and value("x", {}) == "x" and value('"x"', {}) == "x"
    assert value('"x"', {"type": "string"}) == '"x"'
    assert value("5", {"$ref": "#/properties/a"}) == 5
    endless = {"anyOf": [{"$ref": "#/properties/a"}] * 1000}
    assert value("5", endless) == 5
    assert value("[" * 100_000, {"type": "array"}) == "[" * 100_000


@pytest.mark.parametrize(
    "name", [name for name in REASONING_FORMATS if name not in (*MESSAGE_FORMATS, "minimax-append-think")]
)
def test_thoughts(name: str) -> None:
    form = REASONING_FORMATS[name]
    begin, end = form.markers

    def run(text: str, inside: bool = False, separate: bool = True) -> tuple[str, str]:
        output = parse(OutputParser(reasoning=form, inside=inside, separate=separate), text)  # type: ignore[arg-type]
        return output.reasoning, output.text

    assert run(f"{begin}\nwell\n{end}\n\nyes\n") == ("well", "yes\n")
    assert run(f"well\n{end}\n\nyes", inside=True) == ("well", "yes")
    assert run(f"{begin}well{end}yes", inside=True) == ("well", "yes")
    assert run(f"{begin}well") == ("well", "")
    assert run(f" yes {begin}no") == ("", f" yes {begin}no")
    assert run(f"{begin}\nwell\n{end}\n\nyes", separate=False) == ("", f"{begin}\nwell\n{end}\n\nyes")
    assert form.starts_inside(f"<|assistant|>{begin}\n") and not form.starts_inside(f"{begin}\n\n{end}\n\n")


@pytest.mark.parametrize(("reasoning", "calls"), [("glm45", "glm45"), ("kimi_k2", "kimi_k2")])
def test_a_call_ends_thoughts(reasoning: str, calls: str) -> None:
    output = parse(new_parser(calls, reasoning), "<think>well\n" + WRITERS[calls].calls([WEATHER]))
    assert output.reasoning == "well" and calls_of(output) == [WEATHER] and output.text == ""


def test_harmony() -> None:
    text = (
        "<|channel|>analysis<|message|>first<|end|><|start|>assistant<|channel|>analysis<|message|>second<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>Looking.<|end|>"
        '<|start|>assistant to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{"city": "x"}'
    )
    output = read("gpt-oss", text)
    assert output.reasoning == "first\nsecond" and output.text == "Looking."
    assert calls_of(output) == [("get_weather", {"city": "x"})]
    thoughtful = parse(OutputParser(calls=TOOL_CALL_FORMATS["gpt-oss"], tools=TOOLS), text)
    assert thoughtful.reasoning == "" and thoughtful.text == "firstsecondLooking."


def test_muse() -> None:
    text = (
        " to=self<|message|>first<|eom|><|start|>assistant to=self<|message|>second<|eom|>"
        '<|start|>assistant to=self<|message|><atem:function_calls>\n<atem:invoke name="now">\n</atem:invoke><|eom|>'
        '<|start|>assistant to=get_weather<|message|>\n<atem:function_calls>\n<atem:invoke name="get_weather">\n'
        '<atem:parameter name="city"> a <b> </atem:parameter>\n<atem:parameter name="days">3</atem:parameter>\n'
        '</atem:invoke>\n<atem:invoke name="now">\n</atem:invoke>\n</atem:function_calls><|eom|>'
        '<|start|>assistant to=user<|message|>Say <atem:invoke name="now"></atem:invoke>.<|eot|>'
    )
    output = read("muse", text)
    assert output.reasoning.split("\n")[:2] == ["first", "second"] and '<atem:invoke name="now">' in output.reasoning
    assert calls_of(output) == [("get_weather", {"city": " a <b> ", "days": 3}), ("now", {})]
    assert output.text == 'Say <atem:invoke name="now"></atem:invoke>.'
    cut = '<|start|>assistant to=get_weather<|message|><atem:invoke name="get_weather"><atem:parameter name="city">a'
    for end in ("", "<|eom|>", "<|eot|>"):
        output = read("muse", f"{cut}{end}<|start|>assistant to=user<|message|>done")
        assert output.calls == [] and output.text == cut + "done", "a call that breaks off is text, and ends there"
    assert read("muse", "plain text").text == "plain text"
    assert read("muse", "<|start|>assistant<|message|>no recipient<|eot|>").text == "no recipient"


def test_inkling() -> None:
    text = (
        "<|content_thinking|>first<|end_message|><|message_model|><|content_thinking|>second<|end_message|>"
        "<|message_model|>get_weather<|content_invoke_tool_json|>"
        '{"name":"get_weather","args":{"city":"<|end_message|>"}}<|end_message|>'
        "<|message_model|><|content_text|>Look:<|end_message|>"
        '<|message_model|>rm<|content_invoke_tool_json|>{"name":"rm","args":{}}<|end_message|>'
        "<|message_model|><|content_tool_error|> no<|content_model_end_sampling|>"
    )
    output = read("inkling", text)
    assert output.reasoning == "first\nsecond" and calls_of(output) == [("get_weather", {"city": "<|end_message|>"})]
    assert output.text == 'Look:<|message_model|>rm<|content_invoke_tool_json|>{"name":"rm","args":{}} no'
    thoughtful = parse(OutputParser(calls=TOOL_CALL_FORMATS["inkling"], tools=TOOLS), text)
    assert thoughtful.reasoning == "" and thoughtful.text == "firstsecond" + output.text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("get_weather is there<|end_message|>", "get_weather is there"),
        ("<|message_model|><|content_text|>yes<|content_model_end_sampling|>", "yes"),
        ("<|message_model|><|message_model|><|content_text|>yes", "yes"),
        ("<|message_model|>no kind<|end_message|>", "no kind"),
        ("<|content_text|>a<|content_text|>b<|message_model|>c", "abc"),
    ],
)
def test_inkling_with_marks_that_are_missing(text: str, shown: str) -> None:
    output = read("inkling", text)
    assert (output.text, output.reasoning, output.calls) == (shown, "", [])


def test_inkling_calls_without_an_end_of_thoughts() -> None:
    output = read("inkling", '<|content_thinking|>well<|content_invoke_tool_json|>{"args":{},"name":"now"}')
    assert output.reasoning == "well" and output.text == "" and calls_of(output) == [("now", {})]


def test_whole_thoughts() -> None:
    parser = OutputParser(reasoning=REASONING_FORMATS["qwen3"], whole_thoughts=True)
    events = [event for piece in ("<think>a", "b", "c</think>", "d") for event in parser.push(piece)]
    assert [event.text for event in events] == ["abc", "d"]  # type: ignore[union-attr]


def test_thoughts_that_stay_in_the_text() -> None:
    for text in ("well\n</think>\n\nyes", "<think>well\n</think>\n\nyes"):
        output = parse(OutputParser(reasoning=REASONING_FORMATS["minimax-append-think"], inside=True), text)
        assert output.text == "<think>well\n</think>\n\nyes" and output.reasoning == ""
