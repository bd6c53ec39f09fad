"""Which grammars no finite text satisfies, on what the library prints of a compiled grammar."""

from __future__ import annotations

import json
import random
import re
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.constrained import completion
from sglang.srt.constrained.completion import Group, lark_rules, printed_rules, schema_rules, unfinishable_rule
from sglang.srt.constrained.grammar import GrammarError, GrammarKey
from sglang.srt.constrained.grammar_backends import GrammarBackend, make_backend
from sglang.srt.constrained.schema_places import ROOT
from sglang.srt.constrained.vocabulary import write_vocabulary
from srt.constrained.byte_tokenizer import EOS, TOKENIZER, VOCAB_SIZE


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GrammarBackend:
    vocabulary: Path = tmp_path_factory.mktemp("grammar") / "vocabulary.json"
    write_vocabulary(vocabulary, TOKENIZER, VOCAB_SIZE, {EOS})
    backend = make_backend(request.param, vocabulary)
    backend.load()
    return backend


def required(name: str, schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {name: schema}, "required": [name]}


CYCLE = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f>"],
        "tags": [{"begin": "<f>", "content": {"type": "json_schema", "json_schema": {"$ref": "#"}}, "end": "</f>"}],
    },
}


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json_schema", {"$ref": "#"}),
        ("json_schema", CYCLE),
        ("json_schema", required("a", {"$ref": "#"})),
        ("json_schema", required("a", {"type": "array", "items": {"$ref": "#"}, "minItems": 1})),
        ("json_schema", {"anyOf": [{"$ref": "#"}, required("a", {"$ref": "#"})]}),
        ("ebnf", "root ::= root"),
        ("ebnf", 'root ::= "a" root'),
        ("ebnf", "root ::= a\na ::= b\nb ::= a"),
        ("ebnf", 'root ::= ("x" | [a-z]) (a | b)\na ::= "a" b\nb ::= (a "b") | "c" b'),
        ("ebnf", 'root ::= "a" | "b" dead\ndead ::= dead'),
        ("ebnf", 'root ::= a{2,5}\na ::= "x" a'),
        ("structural_tag", TAG),
    ],
)
def test_grammars_that_need_themselves(backend: GrammarBackend, kind: Any, source: Any) -> None:
    """xgrammar refuses some itself from 0.2.9 on."""
    key = GrammarKey(kind, source if isinstance(source, str) else json.dumps(source))
    try:
        compiled = backend.compile(key).compiled
    except GrammarError as error:
        assert re.search(r"invalid \w+: Circular \$ref chain", str(error))
    else:
        assert compiled.unfinishable_rule() is not None


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json_schema", {"type": "object", "properties": {"next": {"$ref": "#"}}}),
        ("json_schema", required("children", {"type": "array", "items": {"$ref": "#"}})),
        ("json_schema", {"anyOf": [{"type": "null"}, required("a", {"$ref": "#"})]}),
        ("json_schema", True),
        ("json_schema", {"enum": ["root ::= root", "a\nb ::= b"]}),
        ("ebnf", 'root ::= "a" root?\ndead ::= dead'),
        ("ebnf", 'root ::= "(" root* ")"'),
        ("ebnf", "root ::= [(] root{0,3} [)]"),
        ("ebnf", 'root ::= "root ::= root (" | ""'),
        ("regex", r"(a|b)*\\(\"[^\"]*\"\\)"),
        ("structural_tag", {"type": "structural_tag", "format": {"type": "any_text"}}),
    ],
)
def test_grammars_that_can_end(backend: GrammarBackend, kind: Any, source: Any) -> None:
    key = GrammarKey(kind, source if isinstance(source, str) else json.dumps(source))
    assert backend.compile(key).compiled.unfinishable_rule() is None


def test_the_rule_is_named() -> None:
    assert unfinishable_rule(printed_rules('root ::= (("a") | (b))\nb ::= (("b" b))\nc ::= ((c))\n'), "root") == "b"
    assert unfinishable_rule(printed_rules('root ::= ((b)) (=(c))\nb ::= ("" | ("b" b))\n'), "root") is None


def test_long_chains_are_followed_in_linear_time() -> None:
    rules = "".join(f"r{i} ::= ((r{i + 1}))\n" for i in range(20_000))
    assert unfinishable_rule(printed_rules(f'root ::= ((r0))\n{rules}r20000 ::= (("x"))\n'), "root") is None
    assert unfinishable_rule(printed_rules(f"root ::= ((r0))\n{rules}r20000 ::= ((r0))\n"), "root") == "root"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("start: start", "start"),
        ('?start: a | b start\na: "x" b // a\nb[lazy]: (a b)+', "start"),
        ("start: a{2,5}\na: /x\\/y/ a", "start"),
        ('start: [start] "a"', None),
        ('start: a~0..2 "b"\na: "a"', None),
        ('start: a | "b"\na: b{x,y}\nb{x,y}: a', "a"),
        ('start: (%json {"a": {"b": [1]}} | start) <|end|>\n%ignore /[ ]/', None),
        ('start: A+\nA.1: "a" | B\nB: B', "B"),
    ],
)
def test_rules_in_lark(text: str, rule: str | None) -> None:
    assert unfinishable_rule(lark_rules(text), "start") == rule


def test_the_part_of_a_schema_is_named() -> None:
    schema = {"$defs": {"a": required("b", {"$ref": "#/$defs/a"})}, **required("x/y", {"$ref": "#/$defs/a"})}
    rules = schema_rules(schema)
    assert unfinishable_rule(rules, ROOT) == "#"
    (inner,) = (name for name in rules if str(name) == "#/properties/x/y")
    assert unfinishable_rule(rules, inner) == "#/properties/x/y"
    assert unfinishable_rule(schema_rules({"$ref": "#/$defs/none"}), ROOT) is None


def test_long_names_and_deep_nesting_make_no_long_names_of_rules() -> None:
    """Paths written out for each part would have the length of the names above it, for every part below."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(200):
        schema = required("n" * 10_000, schema)
    rules = schema_rules(schema)
    assert len(rules) == 201 and unfinishable_rule(rules, ROOT) is None
    assert sum(len(str(name)) for name in rules) < 201 * 201 * 80


def test_nesting_of_any_depth() -> None:
    depth = 20_000
    nested = printed_rules(f'root ::= {"(" * depth}"a" b{")" * depth}\nb ::= ("b" | (b))\n')
    assert unfinishable_rule(nested, "root") is None
    assert unfinishable_rule(printed_rules(f"root ::= {'(' * depth}root{')' * depth}\n"), "root") == "root"


def test_what_needs_many_rules_is_counted_not_searched_again() -> None:
    """The rules end one after the other, the last one first."""

    class Counted(dict[Any, Any]):
        times = 0

        def __contains__(self, name: object) -> bool:
            self.times += 1
            return super().__contains__(name)

    count = 2000
    names = [f"r{number}" for number in range(count)]
    rules = Counted({name: Group([[after]], {after}) for name, after in pairwise(names)})
    rules[names[-1]] = Group([[None]])
    rules["root"] = Group([[*names, *names[::-1]]], set(names))
    assert unfinishable_rule(rules, "root") is None
    assert rules.times < 10 * count


PIECES = ['"a"', r'"\"b\\"', '"x|y"', "name", "|", "(", ")", "*", "?"]


@pytest.mark.parametrize(
    ("pattern", "own"),
    [
        (completion._LARK_TOKEN, [r"/a\/b/", "/[)]/", "<eos>"]),
        (completion._PRINTED_TOKEN, [r"[\]a-z]", "[(]*"]),
    ],
    ids=["lark", "printed"],
)
def test_tokens_of_random_bodies(pattern: re.Pattern[str], own: list[str]) -> None:
    rng = random.Random(0)
    for _ in range(500):
        pieces = rng.choices(PIECES + own, k=8)
        assert [token[0] for token in pattern.finditer(" ".join(pieces))] == pieces


@pytest.mark.parametrize("body", ['"' + r"\"" * 3000, "/" + r"\/" * 3000, "<" * 3000], ids=["text", "regex", "token"])
def test_a_quote_without_an_end_is_searched_once(body: str) -> None:
    assert [token[0] for token in completion._LARK_TOKEN.finditer(body)] == [body]


@pytest.mark.parametrize("pattern", [completion._LARK_TOKEN, completion._PRINTED_TOKEN], ids=["lark", "printed"])
def test_a_long_text_takes_no_more_memory_than_itself(pattern: re.Pattern[str]) -> None:
    text = '"' + "a" * 100_000 + '"'
    tracemalloc.start()
    try:
        (token,) = pattern.finditer(text)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert token["text"] == text and peak < len(text)
