"""Values that a format writes as plain text, turned into JSON by the tool's schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from sglang.srt.function_call.json_text import escaped

MAX_REFERENCES = 16
"""Of a schema that is nothing but a reference to another one, and of alternatives inside each other."""

Types = frozenset[str]
"""Names of JSON types that a schema allows; empty: any."""

ANY: Types = frozenset()
_WORDS = {"True": "true", "False": "false", "None": "null"}
_JSON_TYPES: dict[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}


def parameter_types(parameters: Mapping[str, Any], name: str) -> Types:
    """The types of the parameter `name`, of a schema that may say anything, also nonsense."""
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, dict) else None
    return _types(schema, parameters, MAX_REFERENCES)


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> Types:
    if not isinstance(schema, dict) or depth == 0:
        return ANY
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return _types(_referenced(reference, root), root, depth - 1)
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset((named,))
    if isinstance(named, list):
        return frozenset(name for name in named if isinstance(name, str))
    for key in ("enum", "const"):
        if key in schema:
            values = schema[key] if key == "enum" and isinstance(schema[key], list) else [schema[key]]
            return frozenset(name for value in values for name in _JSON_TYPES.get(type(value), ()))
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            alternatives = [_types(entry, root, depth - 1) for entry in schema[key]]
            return frozenset().union(*alternatives) if all(alternatives) else ANY
    return ANY


def _referenced(reference: str, root: Mapping[str, Any]) -> Any:
    value: Any = root
    for key in reference.removeprefix("#").split("/")[1:]:
        value = value.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(value, dict) else None
    return value


def as_json(text: str, types: Types) -> str:
    """`text` as JSON of one of the types. What is not of such a type becomes a string, for the client to judge."""
    stripped = text.strip()
    stripped = _WORDS.get(stripped, stripped)
    try:
        value = msgspec.json.decode(stripped)
    except (msgspec.DecodeError, RecursionError):
        return f'"{escaped(text)}"'
    fits = _JSON_TYPES[type(value)]
    if types and types.isdisjoint(fits):
        return f'"{escaped(text)}"'
    if isinstance(value, str) and "string" in types:
        return f'"{escaped(text)}"'
    return stripped
