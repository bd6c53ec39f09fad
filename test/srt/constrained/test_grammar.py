"""Grammars over a byte-level tokenizer built here: what the masks allow must be what the grammar says."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from sglang.srt.constrained.grammar import (
    ANY_JSON,
    FOLLOW_BURST_S,
    FOLLOW_REFILL_S,
    MAX_WHITESPACE,
    Grammar,
    GrammarError,
    GrammarKey,
    grammar_key,
)
from sglang.srt.constrained.grammar_backends import GrammarBackend, make_backend
from sglang.srt.constrained.vocabulary import write_vocabulary
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.allowance import Allowance
from srt.constrained.byte_tokenizer import EOS, TOKENIZER, VOCAB_SIZE

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }
)


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GrammarBackend:
    vocabulary = tmp_path_factory.mktemp("grammar") / "vocabulary.json"
    write_vocabulary(vocabulary, TOKENIZER, VOCAB_SIZE, {EOS, 100_000})
    backend = make_backend(request.param, vocabulary)
    backend.load()
    return backend


def allowed(grammar: Grammar) -> list[int]:
    row = np.zeros(-(-VOCAB_SIZE // 32), np.int32)
    grammar.fill_mask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[:VOCAB_SIZE]).tolist()


def sample(grammar: Grammar, rng: np.random.Generator, limit: int = 400) -> str:
    """A random walk through the masks, as a model would take it."""
    out: list[int] = []
    while not grammar.is_terminated() and len(out) < limit:
        options = allowed(grammar)
        # Ends as soon as it may, and avoids endless strings and white space.
        closing = [t for t in options if t == EOS or TOKENIZER.decode([t]) in ('"', "}")]
        token = closing[0] if closing and rng.random() < 0.5 else int(rng.choice(options))
        assert grammar.accept(token)
        out.append(token)
    assert grammar.is_terminated() and out[-1] == EOS
    return str(TOKENIZER.decode(out[:-1]))


def test_json_schema_output_is_valid(backend: GrammarBackend) -> None:
    start = backend.compile(GrammarKey("json_schema", SCHEMA))
    for seed in range(5):
        text = sample(start.fresh(), np.random.default_rng(seed))
        value = json.loads(text, strict=False)  # xgrammar's bounded strings admit raw control characters
        assert set(value) == {"name", "age"} and isinstance(value["name"], str) and isinstance(value["age"], int)


@pytest.mark.parametrize(
    ("more", "text", "taken"),
    [
        ({}, '{"a": 1, "b"', False),
        ({"additionalProperties": True}, '{"a": 1, "b": 2}', True),
        ({"properties": {"a": {"properties": {"c": {"type": "null"}}, "type": "object"}}}, '{"a": {"d"', False),
    ],
)
def test_objects_hold_what_is_named(backend: GrammarBackend, more: dict[str, object], text: str, taken: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, **more}
    assert feed(backend.compile(GrammarKey("json_schema", json.dumps(schema))), text) == taken


@pytest.mark.parametrize("backend", ["llguidance"], indirect=True)
def test_joined_objects_hold_what_any_part_names(backend: GrammarBackend) -> None:
    parts = [{"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]} for name in "ab"]
    assert feed(backend.compile(GrammarKey("json_schema", json.dumps({"allOf": parts}))), '{"a": 1, "b": 2}')


@pytest.mark.parametrize("source", [SCHEMA, ANY_JSON])
def test_whitespace_in_json_ends(backend: GrammarBackend, source: str) -> None:
    grammar = backend.compile(GrammarKey("json_schema", source))
    assert feed(grammar, "{" + "\n" * MAX_WHITESPACE)
    assert not feed(grammar, " ") and feed(grammar, '"')


def test_regex_output_matches(backend: GrammarBackend) -> None:
    pattern = r"[a-c]{2,5}-(true|hello)\d"
    start = backend.compile(GrammarKey("regex", pattern))
    for seed in range(5):
        assert re.fullmatch(pattern, sample(start.fresh(), np.random.default_rng(seed)))


def test_ebnf_output_matches(backend: GrammarBackend) -> None:
    source = 'root ::= "(" root ")" | [xy]'
    text = sample(backend.compile(GrammarKey("ebnf", source)), np.random.default_rng(1))
    assert re.fullmatch(r"(\()*[xy](\))*", text) and text.count("(") == text.count(")")


def feed(grammar: Grammar, text: str) -> bool:
    return all(grammar.accept(t) for t in TOKENIZER.encode(text))


def test_any_json_is_any_object(backend: GrammarBackend) -> None:
    start = backend.compile(GrammarKey("json_schema", ANY_JSON))
    assert feed(start.fresh(), '{"a": [1, {"b": null}], "hello": true}')
    assert feed(start.fresh(), "{}")
    assert not feed(start.fresh(), "[1]")


OLD_TAG = {
    "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
    "triggers": ["<f>"],
}
NEW_TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f>"],
        "tags": [
            {"begin": "<f>", "content": {"type": "json_schema", "json_schema": {"type": "integer"}}, "end": "</f>"}
        ],
    },
}


@pytest.mark.parametrize("tag", [OLD_TAG, NEW_TAG], ids=["old", "new"])
def test_structural_tag_constrains_after_its_trigger(backend: GrammarBackend, tag: dict[str, object]) -> None:
    grammar = backend.compile(GrammarKey("structural_tag", json.dumps(tag)))
    assert feed(grammar, "any text, then <f>12")
    assert not feed(grammar.copy(), "x")
    assert feed(grammar, "</f> and more")


def test_state_can_be_copied_and_taken_back(backend: GrammarBackend) -> None:
    grammar = backend.compile(GrammarKey("regex", "hello(a|b)c"))
    start = allowed(grammar)
    assert feed(grammar, "hello")
    other = grammar.copy()
    assert feed(other, "a") and allowed(other) == TOKENIZER.encode("c")
    assert sorted(allowed(grammar)) == sorted(TOKENIZER.encode("a") + TOKENIZER.encode("b"))
    assert allowed(grammar.fresh()) == start
    assert feed(grammar, "b")
    grammar.rollback(1)
    assert feed(grammar, "ac")
    grammar.rollback(0)
    assert allowed(grammar) == [EOS]
    assert not grammar.accept(TOKENIZER.encode("a")[0]) and allowed(grammar) == [EOS]


def test_after_the_end_everything_is_allowed_and_nothing_accepted(backend: GrammarBackend) -> None:
    grammar = backend.compile(GrammarKey("regex", "a"))
    assert feed(grammar, "a") and not grammar.is_terminated()
    assert grammar.accept(EOS) and grammar.is_terminated()
    assert not grammar.accept(EOS)
    assert len(allowed(grammar)) == VOCAB_SIZE
    grammar.rollback(1)
    assert not grammar.is_terminated() and allowed(grammar) == [EOS]


@pytest.mark.parametrize(
    ("kind", "source", "text"),
    [
        ("json_schema", '{"type": 3}', "invalid json_schema: [Tt]ype (should|must) be a string"),
        ("json_schema", '{"type"', "invalid json_schema: (Failed to parse JSON|Expecting)"),
        ("regex", "(ab", "(?s)invalid regex: .*(parenthesis|unclosed group)"),
        ("regex", "(?=a)b", "(?s)invalid regex: .*(Lookahead|look-ahead)"),
        ("ebnf", "root ::= foo", "invalid ebnf: .*foo.* (is not defined|not found)"),
        ("structural_tag", "[]", "invalid structural_tag: expected a JSON object"),
        ("structural_tag", "{", "invalid structural_tag: "),
        ("structural_tag", '{"structures": [{}], "triggers": []}', "invalid structural_tag: missing key 'begin'"),
        ("structural_tag", '{"type": "structural_tag"}', "invalid structural_tag: "),
    ],
)
def test_invalid_grammars_are_explained(backend: GrammarBackend, kind: str, source: str, text: str) -> None:
    with pytest.raises(GrammarError, match=text) as error:
        backend.compile(GrammarKey(kind, source))  # type: ignore[arg-type]
    assert "/project/" not in str(error.value)


def test_the_key_of_a_request() -> None:
    assert grammar_key(SamplingParams()) is None
    assert grammar_key(SamplingParams(regex="a")) == ("regex", "a")
    with pytest.raises(GrammarError, match="got json_schema, ebnf"):
        grammar_key(SamplingParams(json_schema="{}", ebnf="root ::= [a]"))


class Clock:
    """Every reading is a tenth of a second after the one before."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.1
        return self.now


def test_a_grammar_that_is_slow_to_follow_uses_up_its_allowance(backend: GrammarBackend) -> None:
    grammar = backend.compile(GrammarKey("regex", "a*"))
    grammar.allowance = Allowance(FOLLOW_BURST_S, FOLLOW_REFILL_S, Clock())
    assert feed(grammar, "a") and not grammar.allowance.exhausted
    assert feed(grammar, "a") and allowed(grammar) and grammar.allowance.exhausted
    assert not grammar.fresh().allowance.exhausted and not grammar.copy().allowance.exhausted


def test_a_grammar_without_a_way_on_is_stuck(backend: GrammarBackend) -> None:
    grammar = backend.compile(GrammarKey("ebnf", 'root ::= "a" | "b" dead\ndead ::= dead'))
    assert not grammar.is_stuck()
    assert feed(grammar, "b") and grammar.is_stuck()
    done = backend.compile(GrammarKey("regex", "a"))
    assert feed(done, "a") and done.accept(EOS) and not done.is_stuck()


THOUGHTS: dict[str, Any] = {
    "type": "optional",
    "content": {
        "type": "sequence",
        "elements": [
            {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"},
            {"type": "regex", "pattern": "\\n{0,2}"},
        ],
    },
}
CALLS: dict[str, Any] = {
    "type": "triggered_tags",
    "triggers": ["<f>"],
    "tags": [{"begin": "<f>", "content": {"type": "const_string", "value": "x"}, "end": "</f>"}],
}
LLGUIDANCE_TAGS: dict[str, tuple[dict[str, object], list[str], list[str]]] = {
    "thoughts, then an answer": (
        {
            "type": "sequence",
            "elements": [
                {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": ["</t>", "<end>"]},
                {"type": "regex", "pattern": "\\n{0,2}"},
                {"type": "json_schema", "json_schema": {"type": "integer"}},
            ],
        },
        ["a < b</t>\n\n12", "</t>3", "x<end>3"],
        ["</t>\n\n\n1", "</t>a"],
    ),
    "a row of calls": (
        {
            "type": "tags_with_separator",
            "tags": [
                {"begin": f"<{n}>", "content": {"type": "regex", "pattern": "[0-9]+/"}, "end": "</f>"} for n in "fg"
            ],
            "separator": ", ",
            "at_least_one": True,
        },
        ["<f>1/</f>", "<g>12/</f>, <f>3/</f>"],
        ["x", "<f>1/</f>x", "<h"],
    ),
    "calls or an answer": (
        {
            "type": "or",
            "elements": [
                {"type": "tag", "begin": "{", "content": {"type": "json_schema", "json_schema": True}, "end": "}"},
                {
                    "type": "sequence",
                    "elements": [
                        {"type": "const_string", "value": 'say "'},
                        {"type": "grammar", "grammar": "root ::= [a-c]{2}"},
                        {"type": "optional", "content": {"type": "const_string", "value": "!"}},
                    ],
                },
            ],
        },
        ['{[1, {"a": null}]}', 'say "ab', 'say "ab!'],
        ["{x", 'say "abc', "saw"],
    ),
    "one call in text": (
        {
            "type": "triggered_tags",
            "triggers": ["<f", "<g>"],
            "tags": [
                {"begin": "<f=1>", "content": {"type": "const_string", "value": "one"}, "end": "</f>"},
                {"begin": "<f=2>", "content": {"type": "const_string", "value": "two"}, "end": "</f>"},
                {"begin": "<g>", "content": {"type": "regex", "pattern": "x+"}, "end": ""},
            ],
            "stop_after_first": True,
        },
        ["text", "text <f=1>one</f>", "<f=2>two</f>", "a < b <g>xx"],
        ["<f=3", "<f=1>one</f>x", "<f=1>two"],
    ),
    "calls first": (
        {
            "type": "triggered_tags",
            "triggers": ["<f>"],
            "tags": [{"begin": "<f>", "content": {"type": "const_string", "value": "x"}, "end": "</f>"}],
            "at_least_one": True,
        },
        ["<f>x</f>", "<f>x</f> and <f>x</f>"],
        ["text", "<f>x</f> and <f>y"],
    ),
    "calls in text behind thoughts": (
        {"type": "sequence", "elements": [THOUGHTS, CALLS]},
        [
            "<t>a <f>x</f> <f>y</t>\n<f>x</f><f>x</f>.",
            "<t></t><t><f>x</f>",
            "<t <f>x</f><t>",
            "<f>x</f>",
            "",
            "a <t>",
        ],
        ["<t></t><f>y", "<t <f>y", "a <t><f>y", "<t></t><t><f>y", "<f>x</f><f>y"],
    ),
    "one call in text behind thoughts": (
        {"type": "sequence", "elements": [THOUGHTS, {**CALLS, "stop_after_first": True}]},
        ["<t>a <f>x</f> <f>y</t>\n<f>x</f>", "<t></t>b <f>x</f>", "<f>x</f>", "a"],
        ["<t></t><f>x</f>.", "<f>x</f>.", "a <f>y"],
    ),
    "an expression or text behind thoughts": (
        {
            "type": "sequence",
            "elements": [
                THOUGHTS,
                {"type": "or", "elements": [CALLS["tags"][0] | {"type": "tag"}, {"type": "regex", "pattern": "[^x]+"}]},
            ],
        },
        ["<t>x\n</t>y", "<t>x</t><f>x</f>", "<f>x</f>", "<t", "a<t>"],
        ["<t>x</t>x", "ax", "<f>x</f>y"],
    ),
    "any text behind thoughts": (
        {"type": "sequence", "elements": [THOUGHTS, THOUGHTS, {"type": "any_text"}]},
        ["<t>x</t><t>y</t>z", "<t>x</t>z", "z", "", "<t>x</t>"],
        [],
    ),
}


@pytest.mark.parametrize("name", LLGUIDANCE_TAGS)
def test_structural_tags_mean_the_same_in_both_libraries(backend: GrammarBackend, name: str) -> None:
    form, good, bad = LLGUIDANCE_TAGS[name]
    start = backend.compile(GrammarKey("structural_tag", json.dumps({"type": "structural_tag", "format": form})))
    for text in good:
        grammar = start.fresh()
        assert feed(grammar, text) and grammar.accept(EOS), text
    for text in bad:
        assert not feed(start.fresh(), text), text


@pytest.mark.parametrize(
    ("kind", "source", "text"),
    [
        (
            "json_schema",
            {"type": "array", "uniqueItems": True},
            'keys: ["uniqueItems"] (cannot be enforced',
        ),
        ("json_schema", {"type": "string", "not": {"pattern": "a"}}, 'Unimplemented keys: ["not"] (cannot be enforced'),
        ("json_schema", False, "false allows no value"),
        ("structural_tag", {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}, "the style 'qwen_xml'"),
        ("structural_tag", {"type": "token", "token": 3}, "'token' is a part that llguidance cannot express"),
        (
            "structural_tag",
            {"type": "any_text", "excludes": ["a"]},
            "'excludes' of 'any_text' is what llguidance",
        ),
        (
            "structural_tag",
            {"type": "sequence", "elements": [{"type": "any_text"}, {"type": "const_string", "value": "a"}]},
            "before another part",
        ),
    ],
)
@pytest.mark.parametrize("backend", ["llguidance"], indirect=True)
def test_what_llguidance_does_not_support_is_refused_by_name(
    backend: GrammarBackend, kind: str, source: object, text: str
) -> None:
    whole = {"type": "structural_tag", "format": source} if kind == "structural_tag" else source
    with pytest.raises(GrammarError) as error:
        backend.compile(GrammarKey(kind, json.dumps(whole)))  # type: ignore[arg-type]
    assert text in str(error.value)


@pytest.mark.parametrize("backend", ["llguidance"], indirect=True)
def test_a_client_does_not_choose_how_strict_llguidance_is(backend: GrammarBackend) -> None:
    schema = {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}
    with pytest.raises(GrammarError, match="uniqueItems"):
        backend.compile(GrammarKey("json_schema", json.dumps(schema)))
    unknown = {
        "type": "object",
        "properties": {"format": {"type": "string", "format": "color"}},
        "required": ["format"],
    }
    assert feed(backend.compile(GrammarKey("json_schema", json.dumps(unknown))), '{"format": "red"}')


@pytest.mark.parametrize("backend", ["llguidance"], indirect=True)
def test_lark_is_a_grammar_of_llguidance(backend: GrammarBackend) -> None:
    grammar = backend.compile(GrammarKey("ebnf", 'start: "a" B+\nB: /[x-z]/'))
    assert feed(grammar, "axyz") and not feed(grammar, "a")


@pytest.mark.parametrize("backend", ["llguidance"], indirect=True)
def test_a_library_that_gives_up_leaves_no_way_on(backend: GrammarBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang.srt.constrained.llguidance_backend.MAX_LEXER_STATES", 20)
    grammar = backend.compile(GrammarKey("regex", "(a|b)*a(a|b){8}"))
    rng = np.random.default_rng(0)
    for _ in range(200):
        options = [t for t in allowed(grammar) if t != EOS]
        if not options:
            break
        assert grammar.accept(int(rng.choice(options)))
    assert grammar.is_stuck() and not grammar.accept(EOS)
