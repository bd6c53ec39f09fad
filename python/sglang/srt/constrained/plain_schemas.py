"""Plain JSON schemas (of one level, without `allOf`, `not` and the like), and their intersection.

`type` is always a list of ATOMS here, all seven if a schema has none: a number is an integer or a fraction, so that
"not an integer" can be expressed. Values come as `enum`, never as `const`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

Schema = dict[str, Any]

ATOMS = ("null", "boolean", "integer", "fraction", "string", "array", "object")
NUMBER = ("integer", "fraction")
INEXPRESSIBLE = "inexpressible"
"""A key of schemas that stand for a part of a complement which cannot be written; its value names the keyword."""

BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_KEYWORDS_OF: dict[str, tuple[str, ...]] = {
    "number": (*BOUNDS, "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": (
        *("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
        *("contains", "minContains", "maxContains", "unevaluatedItems"),
    ),
    "object": (
        *("properties", "patternProperties", "additionalProperties", "propertyNames", "required"),
        *("minProperties", "maxProperties", "unevaluatedProperties"),
    ),
}


class SizedPattern(str):
    """A regular expression whose matches all have the same length."""


class Unwritable(ValueError):
    """Raised when a schema has no plain form known here. The message names the keyword that prevents it."""


def atoms(types: Any) -> list[str]:
    """Returns the types that a value of `type` names."""
    names = types if isinstance(types, list) else [types]
    wanted = {atom for name in names for atom in (NUMBER if name == "number" else (name,))}
    return [atom for atom in ATOMS if atom in wanted]


_KINDS = {name: frozenset(atoms(kind)) for kind, keywords in _KEYWORDS_OF.items() for name in keywords}
_ALL = frozenset(ATOMS)


def atom_of(value: Any) -> str:
    """Returns the type of a JSON value."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "fraction"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def kinds_of(keyword: str) -> frozenset[str]:
    """Returns the types of values that a keyword restricts."""
    return _KINDS.get(keyword, _ALL)


def type_names(kinds: list[str]) -> Any:
    """Returns the value of `type` for `kinds`; None if they are all types. Integers must be included if fractions
    are."""
    if len(kinds) == len(ATOMS):
        return None
    names = [kind for kind in kinds if kind not in NUMBER or "fraction" not in kinds]
    names += ["number"] if "fraction" in kinds else []
    return names[0] if len(names) == 1 else names


def identity(value: Any) -> Any:
    """Returns a hashable value that is equal for equal JSON values: 1 equals 1.0, but not true."""
    if isinstance(value, list):
        return "array", tuple(map(identity, value))
    if isinstance(value, dict):
        return "object", frozenset((name, identity(entry)) for name, entry in value.items())
    return ("number" if atom_of(value) in NUMBER else atom_of(value)), value


# --- two values of one keyword ----------------------------------------------------------------------------------------


def _common_multiple(first: Any, second: Any) -> int:
    if isinstance(first, int) and isinstance(second, int):
        return math.lcm(first, second)
    raise Unwritable('two of "multipleOf"')


def _common_values(first: list[Any], second: list[Any]) -> list[Any]:
    others = {identity(value) for value in second}
    return [value for value in first if identity(value) in others]


COMBINED: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"), min),
    "multipleOf": _common_multiple,
    "uniqueItems": lambda first, second: first or second,
    "required": lambda first, second: list(dict.fromkeys([*first, *second])),
    "type": lambda first, second: [kind for kind in first if kind in second],
    "enum": _common_values,
}
"""Functions that combine two values of a keyword into one that requires both."""


# --- what is left of a schema that no value of some type satisfies ----------------------------------------------------


def simplified(schema: Schema) -> Schema | None:
    """Returns the schema without types that have no valid value and without keywords of other types; None if nothing is
    valid."""
    schema = _shortened(schema)
    impossible = set(_impossible(schema))
    kinds = [kind for kind in schema["type"] if kind not in impossible]
    if not kinds or schema.get("enum") == []:
        return None
    schema = {name: value for name, value in schema.items() if not kinds_of(name).isdisjoint(kinds)}
    schema["type"] = kinds
    return _whole_bounds(schema) if kinds == ["integer"] else schema


def _impossible(schema: Schema) -> Iterator[str]:
    low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    above, below = schema.get("exclusiveMinimum", -math.inf), schema.get("exclusiveMaximum", math.inf)
    most, least = min(high, below), max(low, above)
    if least > most or (least == most and (above == least or below == most)):
        yield from NUMBER
    elif least == most and float(least).is_integer():
        yield "fraction"
    elif math.isfinite(least) and math.isfinite(most) and not _whole_between(schema):
        yield "integer"
    for kind, keywords in (("string", "Length"), ("array", "Items"), ("object", "Properties")):
        if schema.get(f"min{keywords}", 0) > schema.get(f"max{keywords}", math.inf):
            yield kind
    if any(schema.get("properties", {}).get(name, True) is False for name in schema.get("required", ())):
        yield "object"


def _whole_between(schema: Schema) -> bool:
    bounds = _whole_bounds(schema)
    return bool(bounds["minimum"] <= bounds["maximum"])


def _whole_bounds(schema: Schema) -> Schema:
    """Converts the bounds of integers to integers that are themselves allowed."""
    result = {name: value for name, value in schema.items() if name not in ("exclusiveMinimum", "exclusiveMaximum")}
    lower = [math.ceil(schema["minimum"])] if "minimum" in schema else []
    lower += [math.floor(schema["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in schema else []
    upper = [math.floor(schema["maximum"])] if "maximum" in schema else []
    upper += [math.ceil(schema["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in schema else []
    return result | ({"minimum": max(lower)} if lower else {}) | ({"maximum": min(upper)} if upper else {})


def _shortened(schema: Schema) -> Schema:
    """Ends a list before its first position at which no value is valid."""
    entries = schema.get("prefixItems", [])
    ends = entries.index(False) if False in entries else len(entries) if schema.get("items") is False else None
    if ends is None:
        return schema
    schema = {**schema, "maxItems": min(ends, schema.get("maxItems", ends)), "prefixItems": entries[:ends]}
    return schema if ends else {name: value for name, value in schema.items() if name != "prefixItems"}
