"""Random texts that the grammar of a schema allows, against a validator: no model, so a thousand answers are cheap."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
import xgrammar
from transformers import AutoTokenizer

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.constrained.grammar import Grammar, GrammarError, GrammarKey
from sglang.srt.constrained.grammar_backends import make_backend
from sglang.srt.constrained.vocabulary import write_vocabulary
from sglang.srt.constrained.xgrammar_backend import COMPILE, XGrammarBackend

from .generator import LEVELS, Schema, schemas

VOCABULARY = 4096
MAX_TOKENS = 600
WALKS = 3


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEFAULT_MODEL_PATH)


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


def walk(grammar: Grammar, tokenizer: Any, rng: random.Random) -> str | None:
    """A text of tokens drawn from those allowed, which ends where it may; None if it is still going on at the limit."""
    ids, end = [], tokenizer.eos_token_id
    mask = np.zeros(VOCABULARY // 32, np.int32)
    for _ in range(MAX_TOKENS):
        grammar.fill_mask(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if end in allowed:
            return tokenizer.decode(ids)
        inked = [i for i in allowed if tokenizer.decode([i]).strip()]  # white space says nothing
        ids.append(int(rng.choice(inked or list(allowed))))
        assert grammar.accept(ids[-1])
    return None


@pytest.mark.parametrize("library", ["xgrammar", "llguidance"])
@pytest.mark.parametrize("level", range(len(LEVELS)), ids=lambda level: LEVELS[level].__name__)
def test_what_a_grammar_allows_is_valid(level: int, library: str, vocabulary: Path, tokenizer: Any) -> None:
    backend = make_backend(library, vocabulary)
    backend.load()
    complete = 0
    for name, schema in schemas(4)[4 * level : 4 * level + 4]:
        try:
            start = backend.compile(GrammarKey("json_schema", json.dumps(schema)))
        except GrammarError as error:
            assert re.search("cannot be enforced|Unsatisfiable", str(error)), name
            assert level >= 8 or (library == "llguidance" and "exclusive" in str(error)), name
            complete += 1
            continue
        for seed in range(WALKS):
            text = walk(start.fresh(), tokenizer, random.Random(seed))
            if text is not None:
                complete += 1
                assert jsonschema_rs.is_valid(schema, json.loads(text)), (name, schema, text)
    assert complete >= 4


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
    '"not"': {"type": "string", "not": {}},
    '"contains"': {"type": "array", "contains": {"const": 3}},
    '"dependentRequired"': {**OBJECT, "dependentRequired": {"a": ["b"]}},
    '"dependentSchemas"': {**OBJECT, "dependentSchemas": {"a": {"required": ["b"]}}},
    '"if"': {**OBJECT, "if": {"required": ["a"]}, "then": False},
    '"allOf" of several schemas': {"allOf": [NUMBER_AT_MOST_9, {"minimum": 0}]},
    '"properties" beside "allOf"': {"properties": {}, "allOf": [OBJECT]},
    '"maximum" beside "$ref"': {"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n", "maximum": 3},
    '"minimum" beside "anyOf"': {"minimum": 3, "anyOf": [{"type": "integer"}]},
    '"maximum" beside "enum"': {"enum": [1, 20], "maximum": 5},
    'a value of "enum" that "type" forbids': {"type": "string", "enum": ["a", 1]},
    'a value of "const" that "type" forbids': {"type": "integer", "const": 1.5},
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


@pytest.mark.parametrize("bounds", [(0, 0.5), (3, 3.5), (-0.5, 0)])
def test_a_bound_that_llguidance_would_allow_is_refused(bounds: tuple[float, float], vocabulary: Path) -> None:
    backend = make_backend("llguidance", vocabulary)
    backend.load()
    schema = {"type": "number", "exclusiveMinimum": bounds[0], "exclusiveMaximum": bounds[1]}
    with pytest.raises(GrammarError, match="exclusiveM.* so near to the other bound at #/items cannot be enforced"):
        backend.compile(GrammarKey("json_schema", json.dumps({"type": "array", "items": schema})))
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


def test_calls_may_have_parameters_of_all_kinds(backend: XGrammarBackend) -> None:
    """A function checks its arguments, and agents' tools use every keyword."""
    content = {"type": "json_schema", "json_schema": REFUSED['"uniqueItems"']}
    tag = {"begin": "<f>", "content": content, "end": "</f>"}
    whole = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f>"], "tags": [tag]}}
    backend.compile(GrammarKey("structural_tag", json.dumps(whole)))
    answer = {"type": "structural_tag", "format": {"type": "sequence", "elements": [content]}}
    with pytest.raises(GrammarError, match="uniqueItems"):
        backend.compile(GrammarKey("structural_tag", json.dumps(answer)))
