"""Which types a value written as plain text may have."""

from __future__ import annotations

from typing import Any

import pytest

from sglang.srt.function_call import schema_types
from sglang.srt.function_call.schema_types import MAX_REFERENCE, MAX_SCHEMAS, MAX_VALUES, parameter_types, referenced
from srt.function_call.counted_values import Values

DEFINITIONS = {
    "count": {"type": "integer"},
    "text": {"allOf": [{"$ref": "#/$defs/word"}, {"maxLength": 9}]},
    "word": {"type": "string"},
    "loop": {"allOf": [{"$ref": "#/$defs/loop"}]},
    "options": {"properties": {"a": {"type": "boolean"}}},
}


def types_of(schema: Any) -> set[str]:
    return set(parameter_types({"properties": {"a": schema}, "$defs": DEFINITIONS}, "a"))


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"allOf": [{"type": "integer"}]}, {"integer"}),
        ({"allOf": [{"minimum": 1}, {"type": "integer"}]}, {"integer"}),
        ({"allOf": [{"$ref": "#/$defs/count"}], "description": "how many"}, {"integer"}),
        ({"allOf": [{"$ref": "#/$defs/text"}]}, {"string"}),
        ({"allOf": [{"type": ["string", "null"]}, {"type": ["string", "integer"]}]}, {"string"}),
        ({"allOf": [{"type": "number"}, {"type": "integer"}]}, {"integer"}),
        ({"allOf": [{"anyOf": [{"type": "string"}, {"type": "null"}]}, {"enum": ["x", None]}]}, {"string", "null"}),
        ({"type": "string", "anyOf": [{"minLength": 1}, {"maxLength": 9}]}, {"string"}),
        ({"$ref": "#/$defs/count", "allOf": [{"minimum": 1}]}, {"integer"}),
        ({"anyOf": [{"allOf": [{"type": "integer"}]}, {"type": "null"}]}, {"integer", "null"}),
        ({"anyOf": [{"type": "integer"}, {}]}, set()),
        ({"allOf": [{"type": "string"}, {"type": "object"}]}, {"string"}),  # nothing is valid
        ({"$ref": "#/$defs/loop"}, set()),
        ({"allOf": 5, "anyOf": {}, "oneOf": [None], "$ref": []}, set()),
        ({"anyOf": [{"type": "string"}] * (MAX_SCHEMAS + 1)}, set()),
        (None, set()),
    ],
)
def test_joined_schemas(schema: Any, types: set[str]) -> None:
    assert types_of(schema) == types


@pytest.mark.parametrize(
    ("parameters", "types"),
    [
        ({"allOf": [{"properties": {"b": {}}}, {"properties": {"a": {"type": "string"}}}]}, {"string"}),
        ({"$ref": "#/$defs/options"}, {"boolean"}),
        ({"oneOf": [{"properties": {"a": {"type": "string"}}}, {"properties": {"b": {}}}]}, {"string"}),
        ({"anyOf": [{"properties": {"a": {"type": kind}}} for kind in ("string", "null")]}, {"string", "null"}),
        ({"properties": {"b": {}}, "additionalProperties": {"type": "string"}}, {"string"}),
        ({"properties": {"a": {"type": "string"}}, "allOf": [{"required": ["a"]}]}, {"string"}),
        ({"properties": 5, "additionalProperties": False}, set()),
        ({}, set()),
    ],
)
def test_parameters_in_joined_schemas(parameters: dict[str, Any], types: set[str]) -> None:
    assert set(parameter_types({**parameters, "$defs": DEFINITIONS}, "a")) == types


def test_the_work_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """References and long lists lead to no more schemas than that."""
    looked_at: list[Any] = []
    monkeypatch.setattr(schema_types, "named_types", lambda schema: looked_at.append(schema) or schema_types.ANY)
    many = [{"$ref": "#"}] * 100_000
    parameter_types({"allOf": many, "anyOf": many, "properties": {"a": {"allOf": many}}}, "a")
    assert len(looked_at) <= MAX_SCHEMAS


@pytest.mark.parametrize("word", ["enum", "type"])
def test_a_value_costs_no_more_with_a_longer_list(word: str) -> None:
    Values.num_read = 0
    assert types_of({word: Values(["string"] * 100_000)}) == {"string"}
    assert Values.num_read <= MAX_VALUES


def test_a_very_long_reference_is_not_followed() -> None:
    name = "a" * MAX_REFERENCE
    assert referenced("#/b", {"b": 1}) == 1 and referenced(f"#/{name}", {name: 1}) is None
