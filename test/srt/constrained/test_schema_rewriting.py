"""What a schema becomes allows the same values: judged by a validator, for random schemas and every value of a small
world."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import jsonschema_rs
import pytest

from sglang.srt.constrained.schema_keywords import InexpressibleSchema
from sglang.srt.constrained.schema_rewriting import rewritten

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
