"""Which JSON types a tool's schema allows for a parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

MAX_SCHEMAS = 64
"""Schemas that are looked at for one parameter: references and alternatives may lead to any number."""
MAX_VALUES = 1024
"""Values of an `enum`, or names in a list of types, that are looked at for each value that a model writes."""
MAX_REFERENCE = 4096
"""Characters of a reference that is followed."""
_CHOICES = ("anyOf", "oneOf")

Types = frozenset[str]
"""Names of JSON types that a schema allows; empty: any."""

ANY: Types = frozenset()
JSON_TYPES: dict[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}
"""Names of the JSON types of a decoded value."""


def parameter_types(parameters: Mapping[str, Any], name: str, named: Callable[[Any], Types] | None = None) -> Types:
    """Returns the types of the parameter `name`. The schema may be anything, even invalid. named: does what
    `named_types` does."""
    schemas = _Schemas(parameters)
    of_one = named or named_types
    return schemas.types(parameters, lambda part: schemas.types(_property(part, name), of_one, all), any)


class _Schemas:
    """Evaluates schemas within `root`, at most `MAX_SCHEMAS` of them; any type counts as allowed by the others."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_left = MAX_SCHEMAS

    def types(self, schema: Any, of_one: Callable[[Any], Types], named_by: Callable[[Iterable[Types]], bool]) -> Types:
        """Returns the types that a schema and all that it joins allow.

        of_one: returns the types that a schema itself allows. named_by: `any` or `all` of the alternatives must name
        types for them to count: a function's parameter may occur in only some.
        """
        self._num_left -= 1
        if self._num_left < 0 or not isinstance(schema, dict):
            return ANY
        types = of_one(schema)
        parts = _list(schema, "allOf")
        if isinstance(schema.get("$ref"), str):
            parts = [referenced(schema["$ref"], self._root), *parts]
        for part in parts:
            types = _both(types, self.types(part, of_one, named_by))
        for key in _CHOICES:
            choices = [self.types(part, of_one, named_by) for part in _list(schema, key)]
            if named_by(choices):
                types = _both(types, frozenset().union(*choices))
        return types


def joined_schemas(schema: Any, root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the schema and those that it refers to, joins or chooses from, at most `MAX_SCHEMAS`."""
    pending: list[Any] = [schema]
    schemas: list[Mapping[str, Any]] = []
    for _ in range(MAX_SCHEMAS):
        part = pending.pop(0) if pending else None
        if not isinstance(part, dict):
            continue
        schemas.append(part)
        if isinstance(part.get("$ref"), str):
            pending.append(referenced(part["$ref"], root))
        for key in ("allOf", *_CHOICES):
            pending += _list(part, key)
    return schemas


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value[: MAX_SCHEMAS + 1] if isinstance(value, list) else []


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the properties that a schema itself describes, by name."""
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def _property(schema: Any, name: str) -> Any:
    """Returns the schema of a property; None if there is none."""
    properties = properties_of(schema)
    return properties[name] if name in properties else schema.get("additionalProperties")


def _both(first: Types, second: Types) -> Types:
    """Returns the types that both allow; if there are none, those that one of them allows."""
    if not first or not second:
        return first or second
    return _with_integer(first) & _with_integer(second) or first


def _with_integer(types: Types) -> Types:
    """Adds integer if number is allowed."""
    return types | {"integer"} if "number" in types else types


def named_types(schema: Any) -> Types:
    """Returns the types that the schema itself names; empty: none."""
    if not isinstance(schema, dict):
        return ANY
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset((named,))
    if isinstance(named, list):
        return frozenset(name for name in named[:MAX_VALUES] if isinstance(name, str))
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    return frozenset(name for value in values[:MAX_VALUES] for name in JSON_TYPES.get(type(value), ()))


def referenced(reference: str, root: Mapping[str, Any]) -> Any:
    """Returns the target of the reference within `root`; None if there is none, and for a very long one."""
    if len(reference) > MAX_REFERENCE:
        return None
    value: Any = root
    for key in reference.removeprefix("#").split("/")[1:]:
        if not isinstance(value, dict):
            return None
        value = value.get(key.replace("~1", "/").replace("~0", "~"))
    return value
