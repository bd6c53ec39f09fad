"""Grammar of tagged arguments, one after the other, for forced calls; `tagged_calls` reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from sglang.srt.constrained.grammar import MAX_WHITESPACE
from sglang.srt.function_call.schema_types import parameter_types
from sglang.srt.sampling.limits import MAX_GRAMMAR_LENGTH

Format = dict[str, Any]
"""A part of a structural tag."""

_ANY_TEXT: Format = {"type": "any_text"}
_DEFINITIONS = ("$defs", "definitions")
NAME = "NAME"
MAX_PARAMETERS = MAX_GRAMMAR_LENGTH // 64
"""Of all functions of a request: each takes more than 64 characters of the grammar, so more are refused anyway, but
only after all of them were written on the event loop."""


def verify_count(schemas: Iterable[Mapping[str, Any]]) -> None:
    """Raises ValueError for functions with too many parameters."""
    count = sum(len(schema["properties"]) for schema in schemas if isinstance(schema.get("properties"), dict))
    if count > MAX_PARAMETERS:
        raise ValueError(f"the functions have {count} parameters, at most {MAX_PARAMETERS} are allowed; offer fewer.")


def tagged_arguments(schema: Mapping[str, Any], key: str, end: str) -> Format:
    """Returns the grammar of a call's arguments. schema: of an object; key: the text before a value, with NAME for the
    argument's name; end: the text after it.

    Arguments come in the schema's order; optional ones may be missing. A value that may be a string is any text up to
    `end`, unless the schema lists its values: as raw text has no quotes, `pattern` and lengths of strings are not
    enforced. If the schema names no arguments and does not forbid any, any names and texts are allowed.

    Raises ValueError if the definitions, which are copied to each value that refers to them, are too long.
    """
    properties = schema.get("properties")
    required = schema.get("required")
    named = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    if not isinstance(properties, dict) or not properties:
        if schema.get("additionalProperties") is False:
            return {"type": "const_string", "value": ""}
        return {"type": "star", "content": _tag(key.partition(NAME)[0], _ANY_TEXT, end)}
    definitions = {word: schema[word] for word in _DEFINITIONS if word in schema}
    referring = {name for name, of_value in properties.items() if definitions and _refers(of_value)}
    if referring and len(referring) * len(msgspec.json.encode(definitions)) > MAX_GRAMMAR_LENGTH:
        raise ValueError(
            f"{len(referring)} parameters of a function refer to definitions, which are copied to each of them:"
            f" more than {MAX_GRAMMAR_LENGTH} characters in all; write the schemas out, or use fewer."
        )
    elements = []
    for name, of_value in properties.items():
        known = definitions if name in referring else {}
        argument = _tag(key.replace(NAME, name), _value(schema, name, of_value, known), end)
        elements.append(argument if name in named else {"type": "optional", "content": argument})
    return {"type": "sequence", "elements": elements}


def _value(root: Mapping[str, Any], name: str, schema: Any, definitions: Format) -> Format:
    values = schema.get("enum") if isinstance(schema, dict) else None
    if isinstance(values, list) and values and all(isinstance(value, str) and value for value in values):
        return {"type": "or", "elements": [{"type": "const_string", "value": value} for value in values]}
    types = parameter_types(root, name)
    if not types or "string" in types or not isinstance(schema, dict):
        return _ANY_TEXT
    return {
        "type": "json_schema",
        "json_schema": {**schema, **definitions},
        "max_whitespace_cnt": MAX_WHITESPACE,
    }


def _refers(schema: Any) -> bool:
    """Returns whether the schema contains a reference."""
    pending = [schema]
    while pending:
        entry = pending.pop()
        if isinstance(entry, dict):
            if "$ref" in entry:
                return True
            pending += entry.values()
        elif isinstance(entry, list):
            pending += entry
    return False


def _tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}
