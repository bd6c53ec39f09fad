"""Values that a format writes as plain text, turned into JSON by the tool's schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from sglang.srt.function_call.json_text import escaped
from sglang.srt.function_call.python_text import object_as_json

MAX_SCHEMAS = 64
"""Schemas that are looked at for one parameter: references and alternatives may lead to any number."""

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
    pending = [properties.get(name) if isinstance(properties, dict) else None]
    types: set[str] = set()
    for _ in range(MAX_SCHEMAS):
        if not pending:
            break
        schema = pending.pop()
        alternatives, named = _alternatives(schema, parameters), _named_types(schema)
        if alternatives:
            pending += alternatives
        elif named:
            types |= named
        else:
            return ANY
    return ANY if pending else frozenset(types)


def _alternatives(schema: Any, root: Mapping[str, Any]) -> list[Any]:
    """The schemas that this one refers to for its type."""
    if not isinstance(schema, dict):
        return []
    if isinstance(schema.get("$ref"), str):
        return [referenced(schema["$ref"], root)]
    return next((schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)), [])


def _named_types(schema: Any) -> Types:
    """The types that the schema itself names; empty: none."""
    if not isinstance(schema, dict):
        return ANY
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset((named,))
    if isinstance(named, list):
        return frozenset(name for name in named if isinstance(name, str))
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    return frozenset(name for value in values for name in _JSON_TYPES.get(type(value), ()))


def referenced(reference: str, root: Mapping[str, Any]) -> Any:
    """Returns what the reference within `root` leads to; None if that is nothing."""
    value: Any = root
    for key in reference.removeprefix("#").split("/")[1:]:
        value = value.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(value, dict) else None
    return value


def _python_object(text: str, types: Types) -> str | None:
    """An object or array in Python's spelling, if the types allow it."""
    if not text.startswith(("{", "[")):
        return None
    fits = "object" if text.startswith("{") else "array"
    return object_as_json(text) if not types or fits in types else None


def as_json(text: str, types: Types) -> str:
    """`text` as JSON of one of the types. What is not of such a type becomes a string, for the client to judge."""
    stripped = text.strip()
    stripped = _WORDS.get(stripped, stripped)
    try:
        value = msgspec.json.decode(stripped)
    except (msgspec.DecodeError, RecursionError):
        return _python_object(stripped, types) or f'"{escaped(text)}"'
    fits = _JSON_TYPES[type(value)]
    if isinstance(value, float) and value.is_integer():  # 5.0 is an integer, too
        fits += _JSON_TYPES[int]
    if types and types.isdisjoint(fits):
        return f'"{escaped(text)}"'
    if isinstance(value, str) and "string" in types:
        return f'"{escaped(text)}"'
    return stripped
