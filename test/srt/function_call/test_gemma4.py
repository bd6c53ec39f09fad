"""Calls of Gemma 4 as its template writes them, and as the model does now and then."""

from __future__ import annotations

from typing import Any

import pytest

from sglang.srt.function_call.events import collect
from sglang.srt.function_call.reader import Markers
from srt.function_call.test_chunking import new_parser, run
from srt.function_call.test_unusual_calls import NOW, PARIS, calls_of, read


def call(arguments: str) -> str:
    return f"<|tool_call>call:get_weather{arguments}<tool_call|>"


def weather(**arguments: Any) -> list[Any]:
    return [("get_weather", arguments)]


def test_calls() -> None:
    nested = '{options:{a b:[1,<|"|>x, }<|"|>,{k:null}],flag:true}, days : 3,city:<|"|>Paris "x"\n<|"|>}'
    expected = {"options": {"a b": [1, "x, }", {"k": None}], "flag": True}, "days": 3, "city": 'Paris "x"\n'}
    assert calls_of(read("gemma4", call(nested))) == weather(**expected)
    assert calls_of(read("gemma4", call("{city:Paris,tags:[]}"))) == weather(city="Paris", tags=[])
    assert calls_of(read("gemma4", call('{<|"|>city<|"|>:5}'))) == weather(city="5")
    for broken in ('{city:<|"|>Paris}', "{city}", "{city:Paris", "{options:" + "[" * 300 + "}", "(city)", "{:1}"):
        output = collect(run(new_parser("gemma4"), [call(broken)]))
        assert output.calls == [] and output.text == call(broken)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("{tags:['a']}", {"tags": ["a"]}),
        ("""{tags:["a", 'b, c', d]}""", {"tags": ["a", "b, c", "d"]}),
        ("""{options:{a:[['x'],["y",[1,true]]]}}""", {"options": {"a": [["x"], ["y", [1, True]]]}}),
        ("""{"city":"Paris", 'days': 3}""", {"city": "Paris", "days": 3}),
        ("""{options:{"a b":1,'c':{"d":[]}}}""", {"options": {"a b": 1, "c": {"d": []}}}),
        ("""{tags=['x',"y"],city=Paris,days = 3}""", {"tags": ["x", "y"], "city": "Paris", "days": 3}),
        (r"""{city:"a \"b\", c \n\u00e9"}""", {"city": 'a "b", c \né'}),
        (r"""{city:'it\'s, "so"'}""", {"city": 'it\'s, "so"'}),
        ("""{city:"say "hi" now"}""", {"city": 'say "hi" now'}),
        ("""{city:"}]"}""", {"city": "}]"}),
        ("{city:'s-Hertogenbosch,days:3}", {"city": "'s-Hertogenbosch", "days": 3}),
        ("{city:it's, days:3}", {"city": "it's", "days": 3}),
        (r"""{city:"C:\dir"}""", {"city": r"C:\dir"}),
        ('{city:<|"|>a<|"|>b<|"|>}', {"city": 'a<|"|>b'}),
    ],
)
def test_other_quotes(arguments: str, expected: dict[str, Any]) -> None:
    assert calls_of(read("gemma4", call(arguments))) == weather(**expected)


def test_quotes_that_never_close_are_looked_for_once() -> None:
    text = call("{options:[" + "'a," * 20_000 + "1]}")
    (parsed,) = collect(run(new_parser("gemma4"), [text])).calls
    assert parsed.arguments.count('"\'a"') == 20_000


@pytest.mark.parametrize("thoughts", ["", "<|channel>thought\n"])
def test_quotes_that_never_close_are_looked_for_once_in_all_calls(
    thoughts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_searches = 0

    def counted(self: Markers, *place: Any) -> Any:
        nonlocal num_searches
        num_searches += 1
        return search(self, *place)

    search = Markers.search
    monkeypatch.setattr(Markers, "search", counted)
    counts = []
    for num_calls in (100, 400):
        num_searches = 0
        output = collect(run(new_parser("gemma4", "gemma4"), [thoughts + call('{city:"Paris}') * num_calls]))
        assert calls_of(output) == weather(city='"Paris') * num_calls
        counts.append(num_searches)
    assert counts[1] <= 5 * counts[0]


def test_a_quote_before_one_that_never_closes_counts() -> None:
    text = call('{city:"Paris"}') + call('{city:"Rome}')
    for thoughts in ("", "<|channel>thought\n"):
        output = collect(run(new_parser("gemma4", "gemma4"), [thoughts + text]))
        assert calls_of(output) == weather(city="Paris") + weather(city='"Rome')


def test_thoughts_in_a_channel() -> None:
    paris = call('{city:<|"|>Paris<|"|>}')
    output = read("gemma4", f"<|channel>thought\nwell\n<channel|>Yes.{paris}", "gemma4")
    assert (output.reasoning, output.text, calls_of(output)) == ("well", "Yes.", [PARIS])
    assert read("gemma4", "<|channel>thought\n<channel|>Yes.", "gemma4").text == "Yes."


@pytest.mark.parametrize("before", ["", "<|channel>thought\nwell\n<channel|>", "<|channel>thought\n<channel|>\n"])
def test_a_call_at_the_beginning_of_the_answer_without_its_mark(before: str) -> None:
    paris = 'call:get_weather{city:<|"|>Paris<|"|>}'
    for end in ("", "<tool_call|>"):
        output = read("gemma4", before + paris + end, "gemma4")
        assert (output.text, calls_of(output)) == ("", [PARIS])
        output = read("gemma4", f"{before}{paris}{end}\ncall:now{{}}{end} Done.", "gemma4")
        assert (output.text, calls_of(output)) == (" Done.", [PARIS, NOW])
    for text in ("call:missing{}", "call: me", "call:now", "calling:now{}", "c", "I call:now{}"):
        output = read("gemma4", before + text, "gemma4")
        assert (output.text, output.calls) == (text, [])
