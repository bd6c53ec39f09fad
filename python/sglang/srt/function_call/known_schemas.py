"""What the schemas of a request's tools say about arguments, evaluated once for an output: a model may write the same
argument any number of times, and a client's schema may be large."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.function_call.schema_types import (
    Types,
    joined_schemas,
    named_types,
    parameter_types,
    properties_of,
)

ITEM = "item"
"""The name of an array's entries where they have one, as the entries of an object do."""
_DEFINITIONS = ("$defs", "definitions")


@dataclass(slots=True)
class _Parameters:
    """A schema of parameters. `names`: those that it declares; `types`: of a parameter, None: of any other one."""

    schema: Mapping[str, Any]
    names: frozenset[str]
    types: dict[str | None, Types] = field(default_factory=dict)


class KnownSchemas:
    """The schemas that an output has met. They must not change meanwhile."""

    def __init__(self) -> None:  # all entries are by ids, and hold what has the id: another object could get it
        self._parameters: dict[int, _Parameters] = {}
        self._named: dict[int, tuple[Any, Types]] = {}
        self._levels: dict[tuple[int, ...], Level] = {}

    def types(self, parameters: Mapping[str, Any], name: str) -> Types:
        """Returns the types of the parameter `name`, like `parameter_types`."""
        known = self._parameters.get(id(parameters))
        if known is None:
            names = frozenset[str]().union(*map(properties_of, joined_schemas(parameters, parameters)))
            known = self._parameters[id(parameters)] = _Parameters(parameters, names)
        declared = name if name in known.names else None
        if declared not in known.types:
            known.types[declared] = parameter_types(parameters, name, self.named_types)
        return known.types[declared]

    def named_types(self, schema: Any) -> Types:
        """Returns the types that a schema itself names."""
        if id(schema) not in self._named:
            self._named[id(schema)] = (schema, named_types(schema))
        return self._named[id(schema)][1]

    def level(self, alternatives: Sequence[Any], definitions: Mapping[str, Any]) -> Level:
        """Returns the level whose schema is any of `alternatives`. definitions: those that its references may mean."""
        key = (*map(id, alternatives), *(id(definitions.get(name)) for name in _DEFINITIONS))
        if key not in self._levels:
            self._levels[key] = Level(self, alternatives, definitions)
        return self._levels[key]


class Level:
    """An object or array of arguments, by its schema and those that this one joins."""

    def __init__(self, known: KnownSchemas, alternatives: Sequence[Any], definitions: Mapping[str, Any]) -> None:
        self._known = known
        self._alternatives = alternatives  # held, as `KnownSchemas` has their ids
        schema = {**definitions, **_joined(alternatives)}
        self._definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
        self._parts = joined_schemas(schema, schema)
        self.is_array = not any(ITEM in properties_of(part) for part in self._parts)
        """Whether entries named `ITEM` may be an array's. An object may have a property of the same name."""
        self._types: dict[str, Types] = {}

    def types(self, key: str) -> Types:
        """Returns the types of an entry."""
        if key not in self._types:
            inner = _joined(self._inner(key))
            whole = {"properties": {key: inner}, **self._definitions}
            self._types[key] = parameter_types(whole, key, self._known.named_types)
        return self._types[key]

    def below(self, key: str) -> Level:
        """Returns the level of an entry that is an object or array itself."""
        return self._known.level(self._inner(key), self._definitions)

    def _inner(self, key: str) -> list[Any]:
        """Returns the schemas of an entry; several that are joined are alternatives here."""
        inner = [properties_of(part)[key] for part in self._parts if key in properties_of(part)]
        if not inner and key == ITEM:
            inner = [part["items"] for part in self._parts if "items" in part]
        return inner


def _joined(alternatives: Sequence[Any]) -> Mapping[str, Any]:
    """Returns one schema for several."""
    if len(alternatives) > 1:
        return {"anyOf": alternatives}
    return alternatives[0] if alternatives and isinstance(alternatives[0], dict) else {}
