"""Random texts that the grammar of a schema allows, against a validator: no model, so a thousand answers are cheap."""

from __future__ import annotations

import functools
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
import xgrammar

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.constrained import llguidance_backend
from sglang.srt.constrained.grammar import Grammar, GrammarError, GrammarKey
from sglang.srt.constrained.grammar_backends import make_backend
from sglang.srt.constrained.schema_keywords import InexpressibleSchema, check_keywords
from sglang.srt.constrained.vocabulary import write_vocabulary
from sglang.srt.constrained.xgrammar_backend import COMPILE, XGrammarBackend
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_tokenizer import load_tokenizer

from .generator import LEVELS, Schema, schemas

VOCABULARY = 4096
MAX_TOKENS = 600
WALKS = 3


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(ServerArgs.from_kwargs(model_path=DEFAULT_MODEL_PATH))


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("vocabulary") / "vocabulary.json"
    write_vocabulary(path, tokenizer, VOCABULARY, [tokenizer.eos_token_id])
    return path


@pytest.fixture(scope="module")
def backend(vocabulary: Path) -> XGrammarBackend:
    made = XGrammarBackend(vocabulary)
    made.load()
    return made


@functools.cache
def inked_tokens(tokenizer: Any) -> Any:
    """[V] bool: the others are white space, which says nothing."""
    return np.array([bool(tokenizer.decode([i]).strip()) for i in range(VOCABULARY)])


def walk(grammar: Grammar, tokenizer: Any, rng: random.Random) -> str | None:
    """A text of tokens drawn from those allowed, which ends where it may; None if it is still going on at the limit."""
    ids, end = [], tokenizer.eos_token_id
    mask = np.zeros(VOCABULARY // 32, np.int32)
    for _ in range(MAX_TOKENS):
        grammar.fill_mask(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if end in allowed:
            return tokenizer.decode(ids)
        inked = allowed[inked_tokens(tokenizer)[allowed]]
        ids.append(int(rng.choice(inked if len(inked) else allowed)))
        assert grammar.accept(ids[-1])
    return None


@pytest.mark.parametrize("library", ["xgrammar", "llguidance"])
@pytest.mark.parametrize("level", range(len(LEVELS)), ids=lambda level: LEVELS[level].__name__)
def test_what_a_grammar_allows_is_valid(level: int, library: str, vocabulary: Path, tokenizer: Any) -> None:
    backend = make_backend(library, vocabulary)
    backend.load()
    complete = 0
    for name, schema in schemas(4)[4 * level : 4 * level + 4]:
        start = backend.compile(GrammarKey("json_schema", json.dumps(schema)))
        for seed in range(WALKS):
            text = walk(start.fresh(), tokenizer, random.Random(seed))
            if text is not None:
                complete += 1
                assert jsonschema_rs.is_valid(schema, json.loads(text)), (name, schema, text)
    assert complete >= 4


def enforced_by_xgrammar(schema: Schema) -> bool:
    """Whether the library reads every keyword of the schema as it stands."""
    try:
        check_keywords(schema)
    except InexpressibleSchema:
        return False
    return True


def test_the_schemas_that_neither_library_enforces_alone(
    vocabulary: Path, backend: XGrammarBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What rewriting is for: the table in docs/outputs.md. With it both libraries take all of them."""
    llguidance = make_backend("llguidance", vocabulary)
    llguidance.load()

    def taken_by_llguidance(schema: Schema) -> bool:
        try:
            llguidance.compile(GrammarKey("json_schema", json.dumps(schema)))
        except GrammarError:
            return False
        return True

    every = schemas()
    with monkeypatch.context() as without_rewriting:
        without_rewriting.setattr(llguidance_backend, "rewritten", lambda schema, needs: schema)
        alone = [(enforced_by_xgrammar(schema), taken_by_llguidance(schema)) for _, schema in every]
    counts = Counter(alone)
    assert counts == {(True, True): 265, (True, False): 10, (False, True): 10, (False, False): 15}
    for (name, schema), libraries in zip(every, alone, strict=True):
        if libraries == (False, False):
            compile_schema(backend, schema)
            assert taken_by_llguidance(schema), name
    page = (Path(__file__).parents[2] / "docs" / "outputs.md").read_text(encoding="utf-8")
    cells = [counts[True, True], counts[True, False], counts[False, True], counts[False, False]]
    assert f"| {' | '.join(map(str, cells))} |" in page


def compile_schema(backend: XGrammarBackend, schema: Schema) -> xgrammar.CompiledGrammar:
    """As the server does it. Raises GrammarError."""
    key = GrammarKey("json_schema", json.dumps(schema))
    backend.compile(key)
    assert backend._compiler is not None
    return COMPILE["json_schema"](backend._compiler, key.source)


NUMBER_AT_MOST_9: Schema = {"type": "integer", "maximum": 9}
OBJECT: Schema = {"type": "object", "properties": {"a": {"type": "integer"}}}

REFUSED: dict[str, Schema] = {
    '"uniqueItems"': {"type": "array", "uniqueItems": True},
    '"not"': {"type": "string", "not": {"pattern": "^a"}},
    '"contains"': {"type": "array", "contains": {"const": 3}},
    '"dependentRequired"': {**OBJECT, "additionalProperties": True, "dependentRequired": {"a": ["b"]}},
    '"dependentSchemas"': {**OBJECT, "additionalProperties": True, "dependentSchemas": {"a": {"required": ["b"]}}},
    '"if"': {"type": "string", "if": {"pattern": "^a"}, "then": {"maxLength": 3}},
    '"allOf" of several schemas': {"allOf": [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}]},
    '"oneOf" whose schemas': {"oneOf": [NUMBER_AT_MOST_9, {"type": "number"}]},
    'a "multipleOf" of a number': {"type": "number", "multipleOf": 0.5},
    'a length beside "pattern"': {"type": "string", "pattern": "^a+$", "maxLength": 3},
    'a length beside "format"': {"type": "string", "format": "uri", "maxLength": 9},
    '"maximum" without "type"': {"maximum": 3},
    '"minItems" without "type"': {"minItems": 1},
    '"patternProperties" beside "properties"': {**OBJECT, "patternProperties": {"^a": {"type": "string"}}},
    "\"required\" of 'b'": {**OBJECT, "required": ["b"]},
}


@pytest.mark.parametrize("wrap", [None, "properties", "items", "$defs", "anyOf"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_refused_by_name(name: str, wrap: str | None, backend: XGrammarBackend) -> None:
    schema = REFUSED[name]
    wrapped: dict[str | None, tuple[Schema, str]] = {
        None: (schema, "#"),
        "properties": ({"type": "object", "properties": {"x": schema}}, "#/properties/x"),
        "items": ({"type": "array", "items": schema}, "#/items"),
        "$defs": ({"$defs": {"x": schema}, "type": "null"}, "#/$defs/x"),
        "anyOf": ({"anyOf": [schema, {"type": "null"}]}, "#/anyOf/0"),
    }
    whole, place = wrapped[wrap]
    if "$ref" in schema and wrap is not None:
        whole = {**whole, "$defs": {**schema["$defs"], **whole.get("$defs", {})}}
    with pytest.raises(GrammarError) as error:
        compile_schema(backend, whole)
    assert name in str(error.value) and f" at {place} cannot be enforced" in str(error.value)


DIGIT: Schema = {"type": "integer", "minimum": 0, "maximum": 5}
TWO: Schema = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}},
    "additionalProperties": False,
}
SAID_OTHERWISE: dict[str, tuple[Schema, list[Any]]] = {
    "several allOf": ({"allOf": [NUMBER_AT_MOST_9, {"minimum": 8}]}, [8, 9]),
    "beside allOf": ({"type": "object", "properties": {}, "allOf": [OBJECT]}, [{}, {"a": 3}]),
    "beside $ref": ({"$defs": {"n": DIGIT}, "$ref": "#/$defs/n", "maximum": 1}, [0, 1]),
    "beside anyOf": ({"minimum": 4, "anyOf": [DIGIT, {"type": "null"}]}, [4, 5, None]),
    "names beside anyOf": ({**TWO, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": True}, {"b": None}]),
    "beside enum": ({"enum": [1, 20, "x"], "maximum": 5}, [1, "x"]),
    "enum and type": ({"type": "string", "enum": ["a", 1]}, ["a"]),
    "unequal entries": (
        {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "maxItems": 3},
        [[], [1], [2, 1], [3, 1, 2]],
    ),
    "no text": ({"type": "string", "maxLength": 4, "not": {"enum": ["no", "na", "x"]}}, ["", "n", "nn", "xx", "none"]),
    "no number": ({**DIGIT, "not": {"enum": [0, 3]}}, [1, 2, 4, 5]),
    "contains": ({"type": "array", "items": DIGIT, "contains": {"const": 3}, "maxItems": 3}, [[3], [0, 3], [1, 2, 3]]),
    "dependentRequired": ({**TWO, "dependentRequired": {"a": ["b"]}}, [{}, {"b": None}, {"a": True, "b": None}]),
    "dependentSchemas": (
        {**TWO, "dependentSchemas": {"b": {"properties": {"a": {"const": True}}}}},
        [{}, {"a": False}, {"b": None}, {"a": True, "b": None}],
    ),
    "if": (
        {**TWO, "if": {"properties": {"a": {"const": True}}, "required": ["a"]}, "then": {"required": ["b"]}},
        [{}, {"a": False}, {"a": True, "b": None}],
    ),
    "if, then, else": ({**DIGIT, "if": {"minimum": 3}, "then": {"maximum": 3}, "else": {"maximum": 0}}, [0, 3]),
    "oneOf that overlaps": (
        {"oneOf": [{**DIGIT, "maximum": 9}, {"type": "number", "minimum": 8, "maximum": 12}]},
        [0, 7, 8.5, 10, 12],
    ),
    "rules for names": (
        {"type": "object", "propertyNames": {"pattern": "^[ab]$"}, "additionalProperties": DIGIT, "maxProperties": 2},
        [{}, {"a": 1}, {"b": 5}],
    ),
    "no other properties": ({**TWO, "additionalProperties": True, "unevaluatedProperties": False}, [{}, {"a": True}]),
    "a narrow range": ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, [0.5, 0.001]),
}
"""Schemas of keywords that no library enforces, or not all, and values that are valid."""


@pytest.mark.parametrize("library", ["xgrammar", "llguidance"])
def test_what_can_be_said_otherwise_is_enforced(library: str, vocabulary: Path, tokenizer: Any) -> None:
    """What a grammar allows is valid, and what is valid it allows."""
    backend = make_backend(library, vocabulary)
    backend.load()
    for name, (schema, values) in SAID_OTHERWISE.items():
        for whole, wrap in ((schema, lambda v: v), ({"type": "array", "items": schema, "maxItems": 2}, lambda v: [v])):
            if "$defs" in schema:
                whole = {**whole, "$defs": schema["$defs"]}
            start = backend.compile(GrammarKey("json_schema", json.dumps(whole)))
            texts = [walk(start.fresh(), tokenizer, random.Random(seed)) for seed in range(WALKS)]
            wrong = [text for text in texts if text is not None and not jsonschema_rs.is_valid(whole, json.loads(text))]
            assert not wrong and any(texts), (name, texts)
            for value in values:
                assert allows(start.fresh(), tokenizer, json.dumps(wrap(value))), (name, value)


def allows(grammar: Grammar, tokenizer: Any, text: str) -> bool:
    """Whether a whole text is one of the grammar's, with or without white space between its parts."""
    compact = json.dumps(json.loads(text), separators=(",", ":"))
    return any(
        all(map(grammar_start.accept, [*tokenizer.encode(spelling, add_special_tokens=False), tokenizer.eos_token_id]))
        for spelling, grammar_start in ((text, grammar), (compact, grammar.fresh()))
    )


@pytest.mark.parametrize("library", ["xgrammar", "llguidance"])
@pytest.mark.parametrize("place", ["the whole", "a property that is required"])
def test_a_schema_that_contradicts_itself_is_refused(library: str, place: str, vocabulary: Path) -> None:
    backend = make_backend(library, vocabulary)
    backend.load()
    schema: Schema = {"allOf": [{**TWO, "required": ["a"]}, {"properties": {"c": {"type": "null"}}, "required": ["c"]}]}
    if place != "the whole":
        schema = {"type": "object", "properties": {"x": schema}, "required": ["x"], "additionalProperties": False}
    with pytest.raises(GrammarError, match="Unsatisfiable|accept any value"):
        backend.compile(GrammarKey("json_schema", json.dumps(schema)))


EXACT_IN_LLGUIDANCE: dict[str, Schema] = {
    "several allOf": {"allOf": [NUMBER_AT_MOST_9, {"minimum": 0}]},
    "beside $ref": {"$defs": {"n": {"type": "integer", "minimum": 0}}, "$ref": "#/$defs/n", "maximum": 3},
    "beside anyOf": {"minimum": 3, "maximum": 9, "anyOf": [{"type": "integer"}, {"type": "null"}]},
    "beside enum": {"enum": [1, 20], "maximum": 5},
    "multiples of a fraction": {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 3},
    "a length beside a pattern": {"type": "string", "pattern": "^a+$", "maxLength": 3},
    "no type": {"maximum": 9, "minimum": 0, "maxLength": 2, "maxItems": 1, "maxProperties": 1},
    "names and patterns": {
        "type": "object",
        "properties": {"ab": {"type": "integer", "maximum": 9, "minimum": 0}},
        "required": ["ab"],
        "patternProperties": {"^b$": {"type": "string", "maxLength": 3}},
        "additionalProperties": False,
    },
}


@pytest.mark.parametrize("name", EXACT_IN_LLGUIDANCE)
def test_llguidance_enforces_more(name: str, vocabulary: Path, tokenizer: Any) -> None:
    backend, schema = make_backend("llguidance", vocabulary), EXACT_IN_LLGUIDANCE[name]
    backend.load()
    start = backend.compile(GrammarKey("json_schema", json.dumps(schema)))
    texts = [walk(start.fresh(), tokenizer, random.Random(seed)) for seed in range(2 * WALKS)]
    assert any(texts) and all(jsonschema_rs.is_valid(schema, json.loads(text)) for text in texts if text)


@pytest.mark.parametrize("bounds", [(0, 0.5), (3, 3.5), (-0.5, 0), (0, 1)])
def test_bounds_that_llguidance_would_allow(bounds: tuple[float, float], vocabulary: Path, tokenizer: Any) -> None:
    backend = make_backend("llguidance", vocabulary)
    backend.load()
    schema = {"type": "number", "exclusiveMinimum": bounds[0], "exclusiveMaximum": bounds[1]}
    start = backend.compile(GrammarKey("json_schema", json.dumps(schema)))
    for value in (*bounds, sum(bounds) / 2, bounds[0] + 0.001, bounds[1] - 0.001, *map(int, bounds)):
        valid = jsonschema_rs.is_valid(schema, value)
        assert allows(start.fresh(), tokenizer, json.dumps(value)) == valid, value
    whole = {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 3.5, "maximum": 4}
    with pytest.raises(GrammarError, match="Unsatisfiable"):
        backend.compile(GrammarKey("json_schema", json.dumps(whole)))


def test_what_is_too_much_for_llguidance_is_refused(vocabulary: Path) -> None:
    backend = make_backend("llguidance", vocabulary)
    backend.load()
    with pytest.raises(GrammarError, match="too complex for llguidance; simplify it"):
        backend.compile(GrammarKey("regex", "(a|b)*c?" * 2000))


ALLOWED: dict[str, Schema] = {
    "annotations anywhere": {
        "$ref": "#/$defs/n",
        "title": "t",
        "description": "d",
        "default": 3,
        "$defs": {"n": OBJECT},
    },
    "names of keywords as properties": {
        "type": "object",
        "properties": {"not": OBJECT, "if": OBJECT, "contains": OBJECT},
    },
    "keywords in data": {"enum": [{"uniqueItems": True, "if": 1}]},
    "switched off": {"type": "array", "uniqueItems": False},
    "one allOf": {"allOf": [NUMBER_AT_MOST_9]},
    "multiples of integers": {"type": "integer", "multipleOf": 7},
    "types that differ": {"oneOf": [{"type": "string"}, NUMBER_AT_MOST_9, {"type": "null"}]},
    "constants that differ": {"oneOf": [{"const": 1}, {"enum": ["a", 2]}]},
    "a required constant": {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in ("a", "b")
        ]
    },
    "the lengths of an address": {"type": "string", "format": "uri", "minLength": 1, "maxLength": 2083},
    "names by a pattern": {"type": "object", "propertyNames": {"pattern": "^[a-z]$"}},
    "enum of the type": {"type": ["string", "null"], "enum": ["a", None]},
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_can_be_enforced_is_not_refused(name: str, backend: XGrammarBackend) -> None:
    compile_schema(backend, ALLOWED[name])


LIMITED: Schema = {"type": "string", "maxLength": 6}


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ('"a\tb"', False),
        ('"a\x01b"', False),
        ('"a"b"', False),
        ('"1234567"', False),
        ('"a\\nb"', True),
        ('"a\\"b"', True),
        ('"\\u00e4x"', True),
        ('"ä名"', True),
    ],
)
@pytest.mark.parametrize("kind", ["json_schema", "structural_tag"])
def test_texts_of_limited_length_hold_what_json_allows(
    text: str, allowed: bool, kind: Any, backend: XGrammarBackend
) -> None:
    """The name of the property is there because letters beyond ASCII must survive the repair."""
    schema = {"type": "object", "properties": {"größe": LIMITED}, "required": ["größe"], "additionalProperties": False}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    assert backend._compiler is not None
    compiled = COMPILE[kind](backend._compiler, json.dumps(schema if kind == "json_schema" else tag))
    assert xgrammar.GrammarMatcher(compiled).accept_string(f'{{"größe": {text}}}') == allowed


@pytest.mark.parametrize("character", [b"\xed\xa0\x80", b"\xed\xbf\xbf"])
def test_texts_of_limited_length_are_utf_8(character: bytes, backend: XGrammarBackend) -> None:
    """Half of a surrogate pair is no character: a reader counts three replacement characters in its place."""
    compiled = compile_schema(backend, LIMITED)
    for text, allowed in ((character, False), (b"\xed\x9f\xbf", True), (b"\xee\x80\x80", True), ("😀".encode(), True)):
        assert xgrammar.GrammarMatcher(compiled).accept_string(b'"' + text + b'"') == allowed, text


def test_calls_may_have_parameters_of_all_kinds(backend: XGrammarBackend) -> None:
    """A function checks its arguments, and agents' tools use every keyword."""
    content = {"type": "json_schema", "json_schema": REFUSED['"uniqueItems"']}
    tag = {"begin": "<f>", "content": content, "end": "</f>"}
    whole = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f>"], "tags": [tag]}}
    backend.compile(GrammarKey("structural_tag", json.dumps(whole)))
    answer = {"type": "structural_tag", "format": {"type": "sequence", "elements": [content]}}
    with pytest.raises(GrammarError, match="uniqueItems"):
        backend.compile(GrammarKey("structural_tag", json.dumps(answer)))
