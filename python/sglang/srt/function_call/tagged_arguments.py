"""Arguments as tagged values, one behind the other, for grammars that force calls: what `tagged_calls` reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sglang.srt.constrained.grammar import MAX_WHITESPACE
from sglang.srt.function_call.coercion import parameter_types

Format = dict[str, Any]
"""A part of a structural tag."""

_ANY_TEXT: Format = {"type": "any_text"}
_DEFINITIONS = ("$defs", "definitions")
NAME = "NAME"


def tagged_arguments(schema: Mapping[str, Any], key: str, end: str) -> Format:
    """Returns the arguments of a call. schema: of an object; key: the text before a value, with NAME for the argument's
    name; end: that behind it.

    Arguments come in the schema's order, those that are not required perhaps. What may be a string is any text up to
    `end`, unless the schema lists its values: as raw text has no quotes, `pattern` and lengths of strings are not
    enforced. Where the schema names no arguments and does not forbid any, each is any name and any text.
    """
    properties = schema.get("properties")
    required = schema.get("required")
    named = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    if not isinstance(properties, dict) or not properties:
        if schema.get("additionalProperties") is False:
            return {"type": "const_string", "value": ""}
        return {"type": "star", "content": _tag(key.partition(NAME)[0], _ANY_TEXT, end)}
    elements = []
    for name, of_value in properties.items():
        argument = _tag(key.replace(NAME, name), _value(schema, name, of_value), end)
        elements.append(argument if name in named else {"type": "optional", "content": argument})
    return {"type": "sequence", "elements": elements}


def _value(root: Mapping[str, Any], name: str, schema: Any) -> Format:
    values = schema.get("enum") if isinstance(schema, dict) else None
    if isinstance(values, list) and values and all(isinstance(value, str) and value for value in values):
        return {"type": "or", "elements": [{"type": "const_string", "value": value} for value in values]}
    types = parameter_types(root, name)
    if not types or "string" in types or not isinstance(schema, dict):
        return _ANY_TEXT
    return {
        "type": "json_schema",
        "json_schema": {**schema, **dict(_shared(root))},
        "max_whitespace_cnt": MAX_WHITESPACE,
    }


def _shared(root: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the definitions that references of a value may lead to."""
    return ((key, root[key]) for key in _DEFINITIONS if key in root)


def _tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}
