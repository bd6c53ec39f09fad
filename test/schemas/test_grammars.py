"""Random texts that the grammar of a schema allows, against a validator: no model, so a thousand answers are cheap."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
import torch
import xgrammar
from transformers import AutoTokenizer

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.constrained.grammar import GrammarError, GrammarKey
from sglang.srt.constrained.grammar_backend import COMPILE, GrammarBackend, write_vocabulary

from .generator import LEVELS, Schema, schemas

VOCABULARY = 4096
MAX_TOKENS = 600
WALKS = 3


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEFAULT_MODEL_PATH)


@pytest.fixture(scope="module")
def backend(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> GrammarBackend:
    path: Path = tmp_path_factory.mktemp("vocabulary") / "vocabulary.json"
    write_vocabulary(path, tokenizer, VOCABULARY, [tokenizer.eos_token_id])
    made = GrammarBackend(path)
    made.load()
    return made


def walk(compiled: xgrammar.CompiledGrammar, tokenizer: Any, rng: random.Random) -> str | None:
    """A text of tokens drawn from those allowed, which ends where it may; None if it is still going on at the limit."""
    matcher, ids, end = xgrammar.GrammarMatcher(compiled), [], tokenizer.eos_token_id
    mask: torch.Tensor = xgrammar.allocate_token_bitmask(1, VOCABULARY)
    for _ in range(MAX_TOKENS):
        matcher.fill_next_token_bitmask(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.numpy().view(np.uint8), bitorder="little"))
        if end in allowed:
            return tokenizer.decode(ids)
        inked = [i for i in allowed if tokenizer.decode([i]).strip()]  # white space says nothing
        ids.append(int(rng.choice(inked or list(allowed))))
        assert matcher.accept_token(ids[-1])
    return None


@pytest.mark.parametrize("level", range(len(LEVELS)), ids=lambda level: LEVELS[level].__name__)
def test_what_a_grammar_allows_is_valid(level: int, backend: GrammarBackend, tokenizer: Any) -> None:
    complete = 0
    for name, schema in schemas(4)[4 * level : 4 * level + 4]:
        try:
            compiled = compile_schema(backend, schema)
        except GrammarError as error:
            assert level >= 8 and "cannot be enforced" in str(error), name
            complete += 1
            continue
        for seed in range(WALKS):
            text = walk(compiled, tokenizer, random.Random(seed))
            if text is not None:
                complete += 1
                assert jsonschema_rs.is_valid(schema, json.loads(text)), (name, schema, text)
    assert complete >= 4


def compile_schema(backend: GrammarBackend, schema: Schema) -> xgrammar.CompiledGrammar:
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
def test_what_cannot_be_enforced_is_refused_by_name(name: str, wrap: str | None, backend: GrammarBackend) -> None:
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
def test_what_can_be_enforced_is_not_refused(name: str, backend: GrammarBackend) -> None:
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
    text: str, allowed: bool, kind: Any, backend: GrammarBackend
) -> None:
    """The name of the property is there because letters beyond ASCII must survive the repair."""
    schema = {"type": "object", "properties": {"größe": LIMITED}, "required": ["größe"], "additionalProperties": False}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    assert backend._compiler is not None
    compiled = COMPILE[kind](backend._compiler, json.dumps(schema if kind == "json_schema" else tag))
    assert xgrammar.GrammarMatcher(compiled).accept_string(f'{{"größe": {text}}}') == allowed


def test_calls_may_have_parameters_of_all_kinds(backend: GrammarBackend) -> None:
    """A function checks its arguments, and agents' tools use every keyword."""
    content = {"type": "json_schema", "json_schema": REFUSED['"uniqueItems"']}
    tag = {"begin": "<f>", "content": content, "end": "</f>"}
    whole = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f>"], "tags": [tag]}}
    backend.compile(GrammarKey("structural_tag", json.dumps(whole)))
    answer = {"type": "structural_tag", "format": {"type": "sequence", "elements": [content]}}
    with pytest.raises(GrammarError, match="uniqueItems"):
        backend.compile(GrammarKey("structural_tag", json.dumps(answer)))
