"""What a schema becomes allows the same values: judged by a validator, for random schemas and every value of a small
world."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import jsonschema_rs
import pytest

from sglang.srt.constrained import schema_keywords
from sglang.srt.constrained.plain_schemas import INEXPRESSIBLE
from sglang.srt.constrained.schema_complements import MAX_TEXT_LENGTH, other
from sglang.srt.constrained.schema_keywords import InexpressibleSchema, is_inexpressible, is_unknown_to_llguidance
from sglang.srt.constrained.schema_rewriting import MAX_WORK, rewritten

Schema = dict[str, Any]

SCALARS = [None, True, False, 0, 1, 2, 3, 1.0, 0.5, 2.5, "", "a", "b", "no", "na", "xo", "nou"]
LISTS = [list(entries) for length in range(4) for entries in itertools.product((1, 2, "a"), repeat=length)]
OBJECTS = [
    {name: value for name, value in zip("ab", values, strict=True) if value != "absent"}
    for values in itertools.product((True, False, 1, 3, "no", "absent"), repeat=2)
]
WORLD = [*SCALARS, *LISTS, *OBJECTS, [[1], [1]], [{"a": 1}], {"a": [1, 2]}, {"a": {"a": 1}}]

JOINING = ("allOf", "anyOf", "oneOf", "not", "if", "dependentRequired", "dependentSchemas", "contains", "uniqueItems")


def number(rng: random.Random) -> Schema:
    bounds = rng.sample(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), rng.randint(0, 2))
    return {"type": rng.choice(("integer", "number")), **{name: rng.choice((0, 1, 2, 0.5)) for name in bounds}}


def text(rng: random.Random) -> Schema:
    return {"type": "string", **rng.choice(({}, {"minLength": 2}, {"maxLength": 2}, {"enum": ["a", "no"]}))}


def values(rng: random.Random) -> Schema:
    return {"enum": rng.sample([None, True, 1, 2, 2.5, "a", "no"], rng.randint(1, 4))}


def entries(rng: random.Random) -> Schema:
    schema = {"type": "array", "items": rng.choice((values, number))(rng), "maxItems": rng.randint(1, 3)}
    extra: Schema = rng.choice(({}, {"contains": values(rng)}, {"uniqueItems": True}, {"minItems": 2}))
    return {**schema, **extra}


def record(rng: random.Random) -> Schema:
    properties = {name: rng.choice((values, number, text, lambda _: True))(rng) for name in "ab"}
    return {"type": "object", "properties": properties, "required": rng.sample("ab", rng.randint(0, 2))}


def part(rng: random.Random) -> Schema:
    """What is said of an object in passing."""
    return rng.choice(
        (
            lambda: {"properties": {"a": values(rng)}},
            lambda: {"required": [rng.choice("ab")]},
            lambda: {"properties": {"b": number(rng)}, "required": ["b"]},
            lambda: {"not": {"required": ["a"]}},
        )
    )()


def joined(rng: random.Random, depth: int = 2) -> Schema:
    make = rng.choice((number, text, values, entries, record) if depth == 0 else (joined,))
    if depth == 0:
        return make(rng)
    base = rng.choice((number, text, values, entries, record))(rng)
    others = [part(rng) if base.get("type") == "object" else joined(rng, depth - 1) for _ in range(2)]
    keyword = rng.choice(("allOf", "anyOf", "oneOf", "not", "if", "dependentRequired", "dependentSchemas"))
    said: Schema = {
        "not": {"not": others[0]},
        "if": {"if": others[0], "then": others[1], **({"else": part(rng)} if rng.random() < 0.5 else {})},
        "dependentRequired": {"dependentRequired": {"a": ["b"]}},
        "dependentSchemas": {"dependentSchemas": {"b": others[1]}},
    }.get(keyword, {keyword: others})
    return {**base, **said}


def normal(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


@pytest.mark.parametrize("seed", range(20))
def test_the_same_values_are_valid(seed: int) -> None:
    rng = random.Random(seed)
    num_plain = 0
    for _ in range(60):
        schema = joined(rng)
        valid = [value for value in WORLD if jsonschema_rs.is_valid(schema, value)]
        try:
            plain = rewritten(schema, lambda part: any(name in part for name in JOINING))
        except InexpressibleSchema:
            assert valid == [], schema
            continue
        if plain == schema:
            continue
        num_plain += not set(JOINING) - {"anyOf"} & keywords(plain)
        allowed = [value for value in WORLD if jsonschema_rs.is_valid(plain, value)]
        assert allowed == valid, (schema, plain)
    assert num_plain >= 20


def keywords(schema: Any) -> set[str]:
    if isinstance(schema, list):
        return set().union(*map(keywords, schema))
    return set(schema).union(*map(keywords, schema.values())) if isinstance(schema, dict) else set()


MANY = {f"p{i}": {"type": "integer", "minimum": i} for i in range(300)}
BRANCHES = [{"properties": {**MANY, f"k{i}": {"const": i}}, "required": [f"k{i}"]} for i in range(8)]
DIGITS = {"enum": [*range(9)]}
HOSTILE: dict[str, Schema] = {
    "products of choices": {"allOf": [{"anyOf": BRANCHES}] * 3},
    "exclusive choices": {"oneOf": BRANCHES},
    "many parts": {"properties": {f"a{i}": {"allOf": [{"minimum": 1}, {"maximum": 9}]} for i in range(MAX_WORK)}},
    "endless": {"$defs": {"n": {"allOf": [{"$ref": "#/$defs/n"}, {"minimum": 1}]}}, "$ref": "#/$defs/n"},
    "endless properties": {
        "$defs": {"n": {"properties": {"x": {"$ref": "#/$defs/n", "minProperties": 1}}}},
        "$ref": "#/$defs/n",
        "minProperties": 1,
    },
    "permutations": {"type": "array", "items": DIGITS, "uniqueItems": True},
    "a place in a long list": {"type": "array", "items": DIGITS, "contains": {"const": 1}, "maxItems": 10**9},
    "elsewhere": {"$ref": "#/properties/a", "properties": {"a": {}}, "minimum": 1},
    "missing": {"$ref": "#/$defs/a", "$defs": {}, "minimum": 1},
    "an old draft": {"allOf": [{"minimum": 5, "exclusiveMinimum": True}, {"maximum": 9}]},
    "no schemas": {"allOf": 5},
    "no schema": {"not": ["a"]},
    "no names": {"allOf": [{"required": 5}, {"required": ["a"]}]},
    "no bound": {"allOf": [{"minimum": "a"}, {"minimum": 3}]},
    "no number": {"type": "integer", "not": {"minimum": [1]}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_too_much_or_no_schema_stays_as_it_was(name: str) -> None:
    """It is refused by its name then."""
    schema = json.loads(json.dumps(HOSTILE[name]))
    assert rewritten(schema, is_inexpressible) == HOSTILE[name]
    assert rewritten(schema, is_unknown_to_llguidance) == HOSTILE[name]
    assert schema == HOSTILE[name], "it is the caller's"


def test_choices_that_nothing_satisfies_are_gone() -> None:
    nothing = {"allOf": [{"type": "integer"}, {"type": "string"}]}
    text = {"type": "string"}
    assert rewritten({"anyOf": [nothing, text]}, is_inexpressible) == {"anyOf": [text]}
    with pytest.raises(InexpressibleSchema, match=r"Unsatisfiable schema: no value satisfies all of #/anyOf/[01]"):
        rewritten({"anyOf": [nothing, nothing]}, is_inexpressible)
    optional = {"type": "object", "properties": {"a": nothing, "b": text}}
    without = {"type": "object", "properties": {"b": text}, "additionalProperties": False}
    assert rewritten(optional, is_inexpressible) == without
    with pytest.raises(InexpressibleSchema, match="Unsatisfiable"):
        rewritten({**optional, "required": ["a"]}, is_inexpressible)


@pytest.mark.parametrize("length", [MAX_TEXT_LENGTH, MAX_TEXT_LENGTH + 1, 5000])
def test_patterns_of_other_strings_have_a_limit(length: int) -> None:
    """They nest as deep as the string is long, and grow with its square."""
    schemas = other("const", "a" * length)
    assert len(str(schemas)) < 8 * MAX_TEXT_LENGTH**2
    assert any(INEXPRESSIBLE in schema for schema in schemas) == (length > MAX_TEXT_LENGTH)


def test_limited_texts_are_found_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schema may have thousands of them, and a pass for each of their names would be quadratic."""
    names = [f"text_{number}" for number in range(50)]
    rules = "\n".join(f'{name} ::= (([^\\"\\\\\\r\\n]))' for name in names)
    uses = "".join(f'"\\"" {name}{{0, 3}} "\\""\n' for name in (*names, "other"))
    passes: list[str] = []
    monkeypatch.setattr(schema_keywords, "_text", lambda name, minimum, maximum: passes.append(name) or "TEXT")
    monkeypatch.setattr(schema_keywords.re, "compile", lambda *given: pytest.fail("a pattern for one name"))
    repaired = schema_keywords.repair_limited_texts(f"{rules}\n{uses}")
    assert passes == names and repaired.count("TEXT") == 50 and '"\\"" other{0, 3} "\\""' in repaired
    assert all(repaired.count(f"\n{name}_any ::= ") == 1 for name in names)
