"""JSON schemas of growing difficulty, each a function of its level and number.

Texts, lists and numbers are bounded, because a model that small, left alone, writes on until its answer is cut off.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

NAMES = ("name", "age", "city", "größe", "a b", "x", "is_open", "tags", 'quo"te', "$id_", "名", "value", "kind", "next")
WORDS = ("red", "green", "blue", "Ada", "größer", "two words", "", '"', "\\", "日本", "line\nbreak")
PATTERNS = ("^[a-z]{2,5}$", "^[0-9]{3}-[0-9]{4}$", "^(yes|no)$", "^[A-Z][a-z]*[0-9]?$", "^\\d{1,3}%$", "^[^x]{1,4}$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "ipv6")


def text(rng: random.Random) -> Schema:
    return {"type": "string", "maxLength": rng.randint(3, 12)}


def integer(rng: random.Random) -> Schema:
    low = rng.randint(-200, 200)
    return {"type": "integer", "minimum": low, "maximum": low + rng.choice((0, 1, 9, 1000))}


def number(rng: random.Random) -> Schema:
    low = rng.choice((-10.5, 0, 0.25, 3))
    return {"type": "number", "minimum": low, "maximum": low + rng.choice((0.5, 1, 100))}


def scalar(rng: random.Random) -> Schema:
    """Level 1: one value."""
    return rng.choice(
        (
            text,
            integer,
            lambda _: {"type": "boolean"},
            lambda _: {"type": "null"},
            lambda r: {"enum": r.sample(WORDS, 3) + [r.randint(-5, 5), None]},
            lambda r: {"const": r.choice((*WORDS, 0, -1.5, True, None, [1, "a"], {"a": [None]}))},
        )
    )(rng)


def flat_object(rng: random.Random, value: Callable[[random.Random], Schema] = scalar) -> Schema:
    """Level 2: required and optional properties, in any share."""
    names = rng.sample(NAMES, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: value(rng) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }


def open_object(rng: random.Random) -> Schema:
    """One that another schema may add properties to."""
    return {name: value for name, value in flat_object(rng).items() if name != "additionalProperties"}


def array(rng: random.Random, value: Callable[[random.Random], Schema] = scalar) -> Schema:
    """Level 3: lists of few entries."""
    least = rng.randint(0, 2)
    return {"type": "array", "items": value(rng), "minItems": least, "maxItems": least + rng.randint(0, 2)}


def bounded(rng: random.Random) -> Schema:
    """Level 4: ranges, lengths and patterns."""
    kind = rng.randrange(5)
    if kind == 0:
        low = rng.randint(-99, 99)
        return {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + rng.randint(2, 300)}
    if kind == 1:
        return number(rng)
    if kind == 2:
        least = rng.randint(0, 4)
        return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 4)}
    if kind == 3:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    return {"type": "number", "exclusiveMinimum": 0, "maximum": rng.choice((0.5, 1, 10))}


def formatted(rng: random.Random) -> Schema:
    """Level 5: texts of a format."""
    return flat_object(rng, lambda r: {"type": "string", "format": r.choice(FORMATS)})


def nested(rng: random.Random, depth: int = 3) -> Schema:
    """Level 6: objects and lists in each other."""
    if depth == 0:
        return rng.choice((scalar, bounded))(rng)
    return rng.choice((flat_object, array))(rng, lambda r: nested(r, depth - 1))


def alternatives(rng: random.Random) -> Schema:
    """Level 7: one of several forms."""
    kind = rng.randrange(4)
    if kind == 0:
        return {"anyOf": [scalar(rng), flat_object(rng), array(rng)]}
    if kind == 1:
        forms = [("circle", "radius"), ("square", "side"), ("text", "value")]
        return {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"kind": {"const": form}, name: integer(rng)},
                    "required": ["kind", name],
                    "additionalProperties": False,
                }
                for form, name in rng.sample(forms, 2)
            ]
        }
    if kind == 2:
        return {"type": ["string", "null"], "maxLength": 8}
    return flat_object(rng, lambda r: {"anyOf": [scalar(r), {"type": "null"}]})


def referring(rng: random.Random) -> Schema:
    """Level 8: definitions, some of which contain themselves."""
    if rng.random() < 0.5:
        return {"$defs": {"part": nested(rng, 1)}, **flat_object(rng, lambda _: {"$ref": "#/$defs/part"})}
    node = {
        "type": "object",
        "properties": {
            "value": scalar(rng),
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
        },
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


def open_ended(rng: random.Random) -> Schema:
    """Level 9: properties and entries that have no name of their own."""
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "object", "additionalProperties": integer(rng), "maxProperties": 2}
    if kind == 1:
        return {
            "type": "object",
            "patternProperties": {"^[a-c]{1,3}$": scalar(rng)},
            "maxProperties": 2,
            "additionalProperties": False,
        }
    if kind == 2:
        return {"type": "array", "prefixItems": [scalar(rng), nested(rng, 1)], "items": False, "minItems": 2}
    return {
        "type": "object",
        "propertyNames": {"pattern": "^[a-z]{1,4}$"},
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 3,
    }


def rare(rng: random.Random) -> Schema:
    """Level 10: what grammars express badly or not at all, alone and within the rest."""
    hard = rng.choice(
        (
            {"allOf": [{"type": "integer", "minimum": 0}, {"maximum": 9}]},
            {"allOf": [open_object(rng), {"properties": {"also": integer(rng)}, "required": ["also"]}]},
            {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 99},
            {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "maxItems": 3},
            {"type": "string", "maxLength": 4, "not": {"const": "no"}},
            {
                "type": "array",
                "items": {"type": "integer", "minimum": 0, "maximum": 5},
                "contains": {"const": 3},
                "maxItems": 4,
            },
            {
                "type": "object",
                "properties": {"a": {"type": "boolean"}, "b": {"type": "boolean"}},
                "dependentRequired": {"a": ["b"]},
                "additionalProperties": False,
            },
            {
                "type": "object",
                "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}},
                "required": ["a"],
                "if": {"properties": {"a": {"const": True}}},
                "then": {"required": ["b"]},
                "additionalProperties": False,
            },
            {"type": "object", "properties": {"a": integer(rng)}, "minProperties": 1, "additionalProperties": False},
            {
                "oneOf": [
                    {"type": "integer", "minimum": 0, "maximum": 9},
                    {"type": "number", "minimum": 5, "maximum": 12},
                ]
            },
            {"type": "object", "properties": {"a": integer(rng)}, "unevaluatedProperties": False},
        )
    )
    wrap = rng.randrange(3)
    if wrap == 0:
        return hard
    if wrap == 1:
        return {"type": "array", "items": hard, "minItems": 1, "maxItems": 2}
    return {"type": "object", "properties": {"it": hard}, "required": ["it"], "additionalProperties": False}


LEVELS: tuple[Callable[[random.Random], Schema], ...] = (
    scalar,
    flat_object,
    array,
    bounded,
    formatted,
    nested,
    alternatives,
    referring,
    open_ended,
    rare,
)
A_LEVEL = 30


def schemas(a_level: int = A_LEVEL) -> list[tuple[str, Schema]]:
    """(name, schema) pairs, the easy ones first."""
    return [
        (f"{level + 1}-{make.__name__}-{number}", make(random.Random(1000 * level + number)))
        for level, make in enumerate(LEVELS)
        for number in range(a_level)
    ]
