"""Calls in forms that models write now and then beside the documented one: read, or left as text, never changed."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from sglang.srt.function_call.events import CallEnd, ParsedOutput, collect
from sglang.srt.function_call.parser import OutputParser
from sglang.srt.function_call.reasoning import ReasoningFormat
from sglang.srt.function_call.registry import REASONING_FORMATS, TOOL_CALL_FORMATS
from srt.function_call.outputs import TOOLS
from srt.function_call.test_chunking import cut, new_parser, random_cuts, run

NOW: tuple[str, dict[str, Any]] = ("now", {})
PARIS = ("get_weather", {"city": "Paris"})


def read(name: str, text: str, reasoning: str | None = None, **options: bool) -> ParsedOutput:
    """What `text` means, however it is cut: whole, by characters, in two anywhere, at random."""
    whole = run(new_parser(name, reasoning, **options), [text])
    rng = random.Random(text)
    halves = [cut(text, [place]) for place in range(1, len(text))]
    for pieces in (list(text), *halves, *(random_cuts(rng, text) for _ in range(10))):
        assert run(new_parser(name, reasoning, **options), pieces) == whole, pieces
    return collect(whole)


def calls_of(output: ParsedOutput) -> list[Any]:
    return [(call.name, json.loads(call.arguments)) for call in output.calls]


def _rows(first: str, second: str) -> dict[str, str]:
    """Two calls without arguments in the formats that write calls in rows."""
    json_rows = [f'{{"name": "{name}", "parameters": {{}}}}' for name in (first, second)]
    return {
        "pythonic": f"[{first}(), {second}()]",
        "mistral": f"[TOOL_CALLS][{', '.join(json_rows)}]",
        "llama3": "; ".join(json_rows),
        "qwen25": f"<tool_call>\n[{', '.join(json_rows)}]\n</tool_call>",
    }


# --- arguments as text ------------------------------------------------------------------------------------------------

_ENCODED = json.dumps(json.dumps({"city": 'a "b"\n'}))
STRING_ARGUMENTS = {
    "hermes": '<tool_call>{"name": "get_weather", "arguments": %s}</tool_call>',
    "qwen25": '<tool_call>{"arguments": %s, "name": "get_weather"}</tool_call>',
    "llama3": '{"name": "get_weather", "parameters": %s}',
    "mistral": '[TOOL_CALLS][{"name": "get_weather", "arguments": %s}]',
    "kimi_k2": "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>%s<|tool_call_end|>",
    "deepseekv31": "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>%s<｜tool▁call▁end｜>",
}


@pytest.mark.parametrize("name", STRING_ARGUMENTS)
def test_arguments_as_a_json_string(name: str) -> None:
    assert calls_of(read(name, STRING_ARGUMENTS[name] % _ENCODED)) == [("get_weather", {"city": 'a "b"\n'})]


@pytest.mark.parametrize("name", STRING_ARGUMENTS)
@pytest.mark.parametrize("value", ['"Paris"', '"[1]"', '"{"', "[1]", "5", "true"])
def test_arguments_that_are_no_object_are_text(name: str, value: str) -> None:
    """A call that would run without what the model has asked for is none."""
    text = STRING_ARGUMENTS[name] % value
    output = read(name, text)
    assert output.calls == [] and output.text == text


def test_no_arguments() -> None:
    for value in ("null", "{}"):
        assert calls_of(read("hermes", f'<tool_call>{{"name": "now", "arguments": {value}}}</tool_call>')) == [NOW]


# --- rows of calls ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", _rows("", ""))
def test_known_functions_beside_an_unknown_one(name: str) -> None:
    for first, second in itertools.permutations(("missing", "now")):
        output = read(name, _rows(first, second)[name])
        assert calls_of(output) == [NOW] and "missing" in output.text and "now" not in output.text
    assert calls_of(read(name, _rows("now", "now")[name])) == [NOW, NOW]
    text = _rows("missing", "other")[name]
    assert read(name, text).text == text


def test_an_unknown_function_hides_nothing_behind_it() -> None:
    """Its arguments are skipped as what they are, also where they look like a call."""
    text = '[TOOL_CALLS][{"name": "missing", "arguments": {"a": "]"}}, {"name": "now", "arguments": {}}] so'
    output = read("mistral", text)
    assert calls_of(output) == [NOW] and output.text.endswith("so")
    output = read("pythonic", '[missing(a="f(", b={"x": [1]}), get_weather(city="Paris")]')
    assert calls_of(output) == [PARIS]


def test_an_array_within_tool_call() -> None:
    text = '<tool_call>\n[{"name": "now", "arguments": {}}, {"name": "get_weather", "arguments": {"city": "Paris"}}]'
    for end in ("\n</tool_call>", "\n", ""):
        output = read("hermes", text + end)
        assert calls_of(output) == [NOW, PARIS] and output.text == ""


def test_prose_in_brackets_is_text() -> None:
    for text in ("[see(1)] now()", "[now (a, b)", "[1, 2]", "[missing(1), now()]"):
        assert read("pythonic", text).text == text


# --- line breaks ------------------------------------------------------------------------------------------------------

WITHOUT_END = {
    "hermes": '<tool_call>{"name": "now", "arguments": {}}',
    "qwen25": '<tool_call>\n[{"name": "now", "arguments": {}}]',
    "pythonic": "[now()]",
    "kimi_k2": "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}",
    "deepseekv3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}",
    "deepseekv31": "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}",
    "mistral": "[TOOL_CALLS]now[ARGS]{}",
    "llama3": '{"name": "now", "parameters": {}}',
}


@pytest.mark.parametrize("name", WITHOUT_END)
def test_text_behind_a_call_keeps_the_line_break_before_it(name: str) -> None:
    for space in ("\n", " \n\n", "", "\n" * 1000):
        output = read(name, WITHOUT_END[name] + space + "Done.") if len(space) < 9 else None
        output = output or collect(run(new_parser(name), [WITHOUT_END[name] + space + "Done."]))
        assert calls_of(output) == [NOW] and output.text == space + "Done."
    assert read(name, WITHOUT_END[name] + "\n").text == ""


# --- tagged values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{'a': True, 'b': [None, 'it\\'s']}", {"a": True, "b": [None, "it's"]}),
        ("{'k': (1, 2)}", {"k": [1, 2]}),
        ("{1: 2}", "{1: 2}"),
        ("{'a', 'b'}", "{'a', 'b'}"),
        ("{'a': f(1)}", "{'a': f(1)}"),
        ("{'a': 1} and more", "{'a': 1} and more"),
        ("{'a': 1", "{'a': 1"),
        ("{" * 100_000, "{" * 100_000),
    ],
)
def test_objects_as_python_writes_them(text: str, value: Any) -> None:
    tagged = f"<tool_call>get_weather<arg_key>options</arg_key><arg_value>{text}</arg_value></tool_call>"
    (call,) = collect(run(new_parser("glm47"), [tagged])).calls
    assert json.loads(call.arguments) == {"options": value}


def test_strings_stay_what_they_are() -> None:
    tagged = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>{'a': True}</arg_value></tool_call>"
    assert calls_of(read("glm47", tagged)) == [("get_weather", {"city": "{'a': True}"})]


_BEGIN = "<tool_call>\n<function=get_weather>\n"
REPAIRED = (
    "<parameter=city>\nParis\n</function>\n</tool_call>",
    "<parameter=city>\nParis</function>\n</tool_call>",
    "<parameter=city>Paris</function></tool_call>",
    "<parameter=city>\nParis\n</parameter>\n</tool_call>",
    "<parameter=city>\nParis\n</tool_call>",
    "<parameter=city>\nParis\n</parameter>\n</function>",
)


@pytest.mark.parametrize("text", REPAIRED)
def test_ends_that_are_missing(text: str) -> None:
    for behind in ("", "\n" + _BEGIN + "<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>", "\nDone."):
        output = read("qwen3_coder", _BEGIN + text + behind)
        assert calls_of(output) == [PARIS] * (2 if "function" in behind else 1)
        assert output.text == (behind if behind.endswith("Done.") else "")


def test_the_next_parameter_ends_a_value() -> None:
    for text in (
        "<parameter=city>\nParis\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        "<parameter=city>Paris<parameter=days>3</parameter></function></tool_call>",
    ):
        assert calls_of(read("qwen3_coder", _BEGIN + text)) == [("get_weather", {"city": "Paris", "days": 3})]


def test_the_next_call_ends_a_call() -> None:
    text = f"{_BEGIN}<parameter=city>\nParis\n</parameter>\n<function=now>\n</function>\n</tool_call>"
    assert calls_of(read("qwen3_coder", text)) == [PARIS, NOW]
    text = f"{_BEGIN}<parameter=city>\nParis\n</parameter>\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
    assert calls_of(read("qwen3_coder", text)) == [PARIS, NOW]


def test_a_value_may_hold_the_formats_own_tags() -> None:
    """Where they do not stand as the model writes its own: at the beginning of a line."""
    value = "<xml>\n  <function>x</function>\n  <parameter=a>\n</xml> </tool_call>"
    text = f"{_BEGIN}<parameter=city>\n{value}\n</parameter>\n</function>\n</tool_call>"
    assert calls_of(read("qwen3_coder", text)) == [("get_weather", {"city": value})]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("if (a &lt; b &amp;&amp; c) &#123; d &#x27;e&#39;", "if (a < b && c) { d 'e'"),
        ("?a=1&copy=2&lt", "?a=1&copy=2&lt"),  # not references: they have no end
        ("&notit; &nbsp &#; &#x; &&amp;amp;", "&notit; &nbsp &#; &#x; &&amp;"),
        ("\nkept\n", "\nkept\n"),
    ],
)
def test_references_in_values_of_mimo(written: str, value: str) -> None:
    """Wherever the output is cut, also within a reference."""
    text = f"<tool_call><function=get_weather><parameter=city>{written}</parameter></function></tool_call>"
    assert calls_of(read("mimo", text)) == [("get_weather", {"city": value})]


def test_a_call_that_breaks_off_is_text() -> None:
    for end in ("<parameter=city>\nPar", "<parameter=city>\nParis\n</parameter>\n", "<parameter=city", ""):
        text = _BEGIN + end
        output = read("qwen3_coder", text)
        assert output.calls == [] and output.text.strip() == text.strip()


_DSML = "<｜DSML｜function_calls>\n{}\n</｜DSML｜function_calls>"


def test_dsml_with_a_json_body() -> None:
    body = '<｜DSML｜invoke name="get_weather">\n{"city": "Paris"}\n</｜DSML｜invoke>'
    assert calls_of(read("deepseekv32", _DSML.format(body))) == [PARIS]
    assert calls_of(read("deepseekv32", body + "\n" + body)) == [PARIS, PARIS]
    for broken in ('{"city": }', '{"city": "Par', "[1]", "{'city': 'Paris'}"):
        text = _DSML.format(f'<｜DSML｜invoke name="get_weather">\n{broken}\n</｜DSML｜invoke>')
        assert read("deepseekv32", text).calls == []


def test_dsml_whose_parameter_does_not_end() -> None:
    """A value never takes in what follows it."""
    begin = '<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Paris'
    whole = f"{begin}</｜DSML｜parameter>\n</｜DSML｜invoke>"
    for rest in ("\n</｜DSML｜invoke>", '\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>', ""):
        output = read("deepseekv32", f"{begin}{rest}\n{whole}")
        assert calls_of(output) == [PARIS] and output.text.startswith(begin)


@pytest.mark.parametrize("invoke", ['<｜DSML｜invoke name="now"/>', '<｜DSML｜invoke name="now" />'])
def test_dsml_that_closes_itself(invoke: str) -> None:
    output = read("deepseekv32", _DSML.format(invoke))
    assert calls_of(output) == [NOW] and output.text == ""
    assert calls_of(read("deepseekv32", _DSML.format(invoke + "\n" + invoke))) == [NOW, NOW]
    unknown = invoke.replace("now", "missing")
    output = read("deepseekv32", _DSML.format(unknown + "\n" + invoke))
    assert calls_of(output) == [NOW] and "missing" in output.text


# --- formats of their own ---------------------------------------------------------------------------------------------


def _m3(arguments: str) -> str:
    text = f'#<tool_call>\n#<invoke name="get_weather">{arguments}#</invoke>\n#</tool_call>'
    return text.replace("#", "]<]minimax[>[")


def test_minimax_m3() -> None:
    nested = (
        "#<options>#<a>x#</a>#<list>#<item>1#</item>#<item>#<k>true#</k>#</item>#</list>#</options>#<days>3#</days>"
    )
    expected = {"options": {"a": "x", "list": [1, {"k": True}]}, "days": 3}
    assert calls_of(read("minimax-m3", _m3(nested))) == [("get_weather", expected)]
    assert calls_of(read("minimax-m3", _m3("#<city><b> </city>\n#</city>"))) == [
        ("get_weather", {"city": "<b> </city>\n"})
    ]
    assert calls_of(read("minimax-m3", _m3("#<options>#</options>#<tags>#</tags>"))) == [
        ("get_weather", {"options": {}, "tags": []})
    ]
    for broken in ("#<city>Paris", "#<city>Paris#</days>", "Paris", "#<options>a#<k>b#</k>#</options>", "#<city"):
        output = read("minimax-m3", _m3(broken))
        assert output.calls == []
    deep = collect(run(new_parser("minimax-m3"), [_m3("#<options>" + "#<k>" * 1000)]))
    assert deep.calls == []


def test_types_of_entries_in_schemas_that_are_joined() -> None:
    place = {"properties": {"zip": {"type": "string"}, "floors": {"items": {"type": "string"}}}}
    text = _m3("#<to>#<zip>75001#</zip>#<floors>#<item>1#</item>#<item>2#</item>#</floors>#</to>")
    for schema in ({"$ref": "#/$defs/place"}, {"allOf": [{"$ref": "#/$defs/place"}]}, {"anyOf": [place, {}]}):
        tools = {"get_weather": {"properties": {"to": schema}, "$defs": {"place": place}}}
        output = collect(run(OutputParser(calls=TOOL_CALL_FORMATS["minimax-m3"], tools=tools), [text]))
        assert calls_of(output) == [("get_weather", {"to": {"zip": "75001", "floors": ["1", "2"]}})]


def test_minimax_m3_thinks_or_not() -> None:
    for text in ("<mm:think>well</mm:think>\n\nYes.", "</mm:think>\n\nYes.", "Yes."):
        output = read("minimax-m3", text, "minimax-m3")
        assert (output.reasoning, output.text) == ("well" if "well" in text else "", "Yes.")


def test_minicpm5_values_with_tags() -> None:
    value = '<param name="x">1</param> ]]'
    text = f'<function name="get_weather"><param name="city"><![CDATA[{value}]]></param></function>'
    assert calls_of(read("minicpm5", text)) == [("get_weather", {"city": value})]
    assert calls_of(read("minicpm5", '<function name="now"/>')) == [NOW]


# --- ids for names ----------------------------------------------------------------------------------------------------


def _counted(arguments: str) -> str:
    return f"<|tool_call_begin|>3<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def test_a_counter_in_place_of_the_name() -> None:
    """The function is the one that takes such arguments, if there is one such."""
    assert calls_of(read("kimi_k2", _counted('{"city": "Paris"}'))) == [PARIS]
    assert calls_of(read("kimi_k2", _counted('{"path": "a"}'))) == [("mcp.files-read", {"path": "a"})]
    for arguments in ('{"missing": 1}', '{"city": "Paris", "path": "a"}', "{}", '{"city": }'):
        text = _counted(arguments)
        assert read("kimi_k2", text).text == text
    only = OutputParser(calls=TOOL_CALL_FORMATS["kimi_k2"], tools={"now": {}})
    assert calls_of(collect([*only.push(_counted('{"any": 1}')), *only.finish()])) == [("now", {"any": 1})]


def test_the_function_of_a_counter_is_found_without_a_look_at_all_names() -> None:
    class Names(dict[str, Any]):
        num_read = 0

        def __iter__(self) -> Iterator[str]:
            for name in super().__iter__():
                Names.num_read += 1
                yield name

    names = Names({f"name{number}": {} for number in range(10_000)})
    tools = {"f": {"properties": names}, "g": {"properties": {"a": {}}, "required": ["a"]}}
    parser = OutputParser(calls=TOOL_CALL_FORMATS["kimi_k2"], tools=tools)
    Names.num_read = 0
    calls = collect([*parser.push(_counted('{"a": 1}') * 3), *parser.finish()])
    assert calls_of(calls) == [("g", {"a": 1})] * 3 and Names.num_read == 0


def test_sections_of_kimi_with_singular_tags() -> None:
    call = "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    for first, last in itertools.product(("tool_calls", "tool_call"), repeat=2):
        text = f"So: <|{first}_section_begin|>{call}\n{call}<|{last}_section_end|> Done."
        output = read("kimi_k2", text)
        assert (output.text, calls_of(output)) == ("So: Done.", [NOW, NOW])


# --- calls within thoughts --------------------------------------------------------------------------------------------

NOW_IN_JSON = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
MARKS = {name: form.markers for name, form in REASONING_FORMATS.items() if isinstance(form, ReasoningFormat)}
APART = [name for name, form in REASONING_FORMATS.items() if isinstance(form, ReasoningFormat) and not form.in_text]
"""Formats of thoughts that have an end mark and are told apart from the text."""


@pytest.mark.parametrize("reasoning", APART)
def test_a_call_in_thoughts_that_do_not_end(reasoning: str) -> None:
    begin, end = MARKS[reasoning]
    for close in ("", f"\n{end}\n\n"):
        output = read("qwen25", f"{begin}\nI look.\n{NOW_IN_JSON}{close}", reasoning)
        assert (output.reasoning, output.text, calls_of(output)) == ("I look.", "", [NOW])
        output = read("qwen25", f"I look.\n{NOW_IN_JSON}{close}It is late.", reasoning, inside=True)
        assert (output.reasoning, output.text.strip(), calls_of(output)) == ("I look.", "It is late.", [NOW])
    output = read("qwen25", f"{begin}I look.\n{NOW_IN_JSON}\n{NOW_IN_JSON}", reasoning)
    assert (output.reasoning, output.text, calls_of(output)) == ("I look.", "", [NOW, NOW])
    output = read("qwen25", f"{begin}I look.\n{NOW_IN_JSON} I wait. {NOW_IN_JSON}", reasoning)
    assert (output.reasoning, output.text, calls_of(output)) == ("I look.", " I wait.", [NOW, NOW])


@pytest.mark.parametrize("reasoning", APART)
def test_a_call_that_is_only_thought_of(reasoning: str) -> None:
    """The thoughts go on behind it and end, or the answer begins with a call."""
    begin, end = MARKS[reasoning]
    for thoughts in (
        f"I could write {NOW_IN_JSON} but wait.",
        f"`{NOW_IN_JSON}`",
        f"{NOW_IN_JSON}\n{NOW_IN_JSON} twice",
        '<tool_call>{"name": "now", "arguments": {"a": or so',
    ):
        for answer in ("Yes.", NOW_IN_JSON):
            output = read("qwen25", f"{begin}{thoughts}{end}\n\n{answer}", reasoning)
            assert (output.reasoning, output.text) == (thoughts, "Yes." if answer == "Yes." else "")
            assert calls_of(output) == ([] if answer == "Yes." else [NOW])
    output = read("qwen25", f"{begin}I look.\n{NOW_IN_JSON}\n{end}\n\n{NOW_IN_JSON}", reasoning)
    assert (output.reasoning, output.text, calls_of(output)) == (f"I look.\n{NOW_IN_JSON}", "", [NOW])


@pytest.mark.parametrize("reasoning", APART)
def test_a_mark_of_calls_in_thoughts_is_none(reasoning: str) -> None:
    begin, end = MARKS[reasoning]
    call = NOW_IN_JSON
    for mention in ("<tool_call>", call.replace("now", "missing"), call[: call.index("now")], "<tool_call>now"):
        thoughts = f"First {mention} and then."
        for answer in ("yes", NOW_IN_JSON):
            output = read("qwen25", f"{begin}{thoughts}{end}\n\n{answer}", reasoning)
            assert (output.reasoning, output.text) == (thoughts, "yes" if answer == "yes" else "")
            assert calls_of(output) == ([] if answer == "yes" else [NOW])


@pytest.mark.parametrize("reasoning", APART)
def test_an_end_mark_in_the_arguments_of_a_call_in_thoughts(reasoning: str) -> None:
    begin, end = MARKS[reasoning]
    call = f'<tool_call>{{"name": "get_weather", "arguments": {{"city": "a{end}b"}}}}</tool_call>'
    output = read("qwen25", f"{begin}I look.{call}", reasoning)
    assert (output.reasoning, output.text, calls_of(output)) == (
        "I look.", "", [("get_weather", {"city": f"a{end}b"})]
    )  # fmt: skip


def test_thoughts_stay_where_nothing_can_be_called() -> None:
    for calls, tools in ((TOOL_CALL_FORMATS["qwen25"], {}), (None, TOOLS)):
        parser = OutputParser(calls=calls, tools=tools, reasoning=REASONING_FORMATS["glm45"])
        output = collect([*parser.push(f"<think>a {NOW_IN_JSON} b</think>c"), *parser.finish()])
        assert (output.reasoning, output.text, output.calls) == (f"a {NOW_IN_JSON} b", "c", [])


def test_thoughts_in_the_text_end_at_a_call_too() -> None:
    output = read("qwen25", f"<think>a {NOW_IN_JSON}", "qwen3", separate=False)
    assert (output.text.strip(), calls_of(output)) == ("<think>a", [NOW])
    output = read("qwen25", f"<think>a {NOW_IN_JSON}", "minimax-append-think")
    assert (output.text.strip(), calls_of(output)) == ("<think>a", [NOW])


def test_where_the_thoughts_before_a_call_end() -> None:
    for pieces in ([f"<think>a\n{NOW_IN_JSON}"], list(f"<think>a\n{NOW_IN_JSON}")):
        parser = new_parser("qwen25", "qwen3")
        events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
        assert any(isinstance(event, CallEnd) for event in events)
        assert parser.reasoning_end == len("<think>a\n") and not parser.in_reasoning


def test_names_of_any_length_and_with_marks_for_inkling() -> None:
    """Clients name functions; a text at the beginning is looked at no further than the longest name, or a header."""
    mark = "<|content_invoke_tool_json|>"
    tools: dict[str, Any] = {"now": {}, f"now{mark}": {}, "a" * 100_000: {}}
    formats = {"calls": TOOL_CALL_FORMATS["inkling"], "reasoning": REASONING_FORMATS["inkling"], "tools": tools}
    output = collect(run(OutputParser(**formats), list(f'now{mark}{{"name":"now","args":{{}}}}<|end_message|>')))
    assert [call.name for call in output.calls] == ["now"] and not output.text
    assert collect(run(OutputParser(**formats), list("nowhere<|end_message|>"))).text == "nowhere"
