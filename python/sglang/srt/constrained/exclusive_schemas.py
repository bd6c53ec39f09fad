"""Tells whether a choice between JSON schemas (`oneOf`) is one in which no value is valid under two of them.

Every rank asks this in a thread of its scheduler, whose steps wait for Python code. So the answer takes time in
proportion to the schemas' size wherever types, constants or one required property tell all of them apart; only short
choices are compared pair by pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeAlias

from sglang.srt.constrained.plain_schemas import identity

MAX_COMPARED = 128
"""Most schemas of a choice that are compared pair by pair; those of a longer one count as overlapping."""

Values: TypeAlias = "frozenset[Any]"
"""JSON values by their `identity`: 1 is 1.0, and not true."""


@dataclass(frozen=True, slots=True)
class _Branch:
    """What tells a schema of a choice from others."""

    types: frozenset[str]
    """Types of its values; empty: not said."""
    constants: Values | None
    """Its only values; None: there may be others."""
    required: Mapping[str, Values]
    """Constants of required properties by name, for a schema of objects alone."""


def exclusive(branches: Any) -> bool:
    """Returns whether no value can be valid under two of these schemas. A long choice that several properties together
    tell apart counts as overlapping."""
    if not isinstance(branches, list):
        return False
    if len(branches) < 2:
        return True
    if not all(isinstance(branch, dict) for branch in branches):
        return False
    known = [_branch(branch) for branch in branches]
    if _have_own_constants(known) or _have_own_types_or_property(known):
        return True
    return len(known) <= MAX_COMPARED and all(_exclude_each_other(*pair) for pair in combinations(known, 2))


def schema_types(schema: Mapping[str, Any]) -> list[str]:
    """Returns the names in a schema's `type`; none if it has no `type`."""
    types = schema.get("type", [])
    return types if isinstance(types, list) else [types]


def _branch(schema: Mapping[str, Any]) -> _Branch:
    types = frozenset(schema_types(schema)) or frozenset(["object"] if "properties" in schema else [])
    properties = schema.get("properties") or {}
    required = {}
    if types == {"object"}:
        for name in set(schema.get("required") or ()) & set(properties):
            if (constants := _constants(properties[name])) is not None:
                required[name] = constants
    return _Branch(types, _constants(schema), required)


def _constants(schema: Any) -> Values | None:
    """Returns the only allowed values; None if there are others."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return frozenset([identity(schema["const"])])
    return frozenset(map(identity, schema["enum"])) if isinstance(schema.get("enum"), list) else None


def _have_own_constants(branches: Sequence[_Branch]) -> bool:
    return _disjoint([branch.constants for branch in branches])


def _have_own_types_or_property(branches: Sequence[_Branch]) -> bool:
    """Returns whether types tell the branches apart, and a required property those of the same type."""
    by_types: dict[frozenset[str], list[_Branch]] = {}
    for branch in branches:
        by_types.setdefault(branch.types, []).append(branch)
    if len(by_types) > MAX_COMPARED or not all(_are_other_types(*pair) for pair in combinations(by_types, 2)):
        return False
    return all(
        len(alike) == 1 or _have_own_constants(alike) or _have_own_property(alike) for alike in by_types.values()
    )


def _have_own_property(branches: Sequence[_Branch]) -> bool:
    names = set(branches[0].required).intersection(*(branch.required for branch in branches))
    return any(_disjoint([branch.required[name] for branch in branches]) for name in names)


def _disjoint(sets: Sequence[Values | None]) -> bool:
    known = [values for values in sets if values is not None]
    return len(known) == len(sets) and len(frozenset().union(*known)) == sum(map(len, known))


def _are_other_types(first: frozenset[str], second: frozenset[str]) -> bool:
    return bool(first and second and not first & second and not {"integer", "number"} <= first | second)


def _exclude_each_other(first: _Branch, second: _Branch) -> bool:
    if _are_other_types(first.types, second.types) or _have_own_constants([first, second]):
        return True
    return _have_own_property([first, second])
