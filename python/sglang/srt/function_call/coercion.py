"""Converts values that a format writes as plain text to JSON, by the types that the tool's schema allows."""

from __future__ import annotations

import msgspec

from sglang.srt.function_call.json_text import escaped
from sglang.srt.function_call.python_text import object_as_json
from sglang.srt.function_call.schema_types import JSON_TYPES, Types

_WORDS = {"True": "true", "False": "false", "None": "null"}


def _python_object(text: str, types: Types) -> str | None:
    """Returns JSON for an object or array in Python's spelling, if the types allow it."""
    if not text.startswith(("{", "[")):
        return None
    fits = "object" if text.startswith("{") else "array"
    return object_as_json(text) if not types or fits in types else None


def as_json(text: str, types: Types) -> str:
    """Returns `text` as JSON of one of the types. Text that fits none becomes a string, for the client to judge."""
    stripped = text.strip()
    stripped = _WORDS.get(stripped, stripped)
    try:
        value = msgspec.json.decode(stripped)
    except (msgspec.DecodeError, RecursionError):
        return _python_object(stripped, types) or f'"{escaped(text)}"'
    fits = JSON_TYPES[type(value)]
    if isinstance(value, float) and value.is_integer():  # 5.0 counts as an integer
        fits += JSON_TYPES[int]
    if types and types.isdisjoint(fits):
        return f'"{escaped(text)}"'
    if isinstance(value, str) and "string" in types:
        return f'"{escaped(text)}"'
    return stripped
