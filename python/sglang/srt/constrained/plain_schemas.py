"""Plain JSON schemas: their form, and the parts of their intersection.

A plain schema joins no schemas: it has no `allOf`, `not` and the like, though the schemas of its properties and items
may. `type` is always a list of ATOMS, all seven if the client's schema has none. JSON schema's "number" is the two
atoms "integer" and "fraction" here, so that "not an integer" can be expressed. Permitted values come as `enum`, never
as `const`. Variables named `kinds` hold atoms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

Schema = dict[str, Any]

ATOMS = ("null", "boolean", "integer", "fraction", "string", "array", "object")
NUMBER = ("integer", "fraction")
INEXPRESSIBLE = "inexpressible"
"""Key that makes a schema a placeholder: it stands for values that no plain schema describes. Its value is the keyword
that forbids these values (`schema_complements.inexpressible`)."""

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
    """Returns the atoms that the value of a client's `type` stands for, in the order of ATOMS. types: a name or a list
    of names."""
    names = types if isinstance(types, list) else [types]
    wanted = {atom for name in names for atom in (NUMBER if name == "number" else (name,))}
    return [atom for atom in ATOMS if atom in wanted]


_KINDS_OF = {name: frozenset(atoms(kind)) for kind, keywords in _KEYWORDS_OF.items() for name in keywords}
_ALL_ATOMS = frozenset(ATOMS)


def atom_of(value: Any) -> str:
    """Returns the atom of a JSON value; 1.0 is an integer."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "fraction"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def kinds_of(keyword: str) -> frozenset[str]:
    """Returns the atoms whose values a keyword restricts; all of them for a keyword such as `enum`."""
    return _KINDS_OF.get(keyword, _ALL_ATOMS)


def type_names(kinds: list[str]) -> Any:
    """Returns the value that `type` has in JSON schema for atoms: a name or a list of names; None for all atoms, which
    need no `type`. "fraction" must come with "integer", as JSON schema has no name for fractions alone."""
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


# --- intersection: two values of one keyword --------------------------------------------------------------------------


def _common_multiple(first: Any, second: Any) -> int:
    """Combines two values of `multipleOf`. Raises Unwritable unless both are integers."""
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
"""For each keyword, a function of the values in two schemas that returns the value in their intersection."""


# --- simplification: types without valid values are removed -----------------------------------------------------------


def simplified(schema: Schema) -> Schema | None:
    """Returns an equivalent schema without the types of which no value is valid, and without keywords that restrict
    none of the remaining types; None if no value at all is valid."""
    schema = _with_max_items(schema)
    impossible = set(_impossible_kinds(schema))
    kinds = [kind for kind in schema["type"] if kind not in impossible]
    if not kinds or schema.get("enum") == []:
        return None
    schema = {name: value for name, value in schema.items() if not kinds_of(name).isdisjoint(kinds)}
    schema["type"] = kinds
    return _with_integer_bounds(schema) if kinds == ["integer"] else schema


def _impossible_kinds(schema: Schema) -> Iterator[str]:
    """Yields types of which no value is valid, as bounds contradict one another or a required property is forbidden."""
    low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    above, below = schema.get("exclusiveMinimum", -math.inf), schema.get("exclusiveMaximum", math.inf)
    maximum, minimum = min(high, below), max(low, above)
    if minimum > maximum or (minimum == maximum and (above == minimum or below == maximum)):
        yield from NUMBER
    elif minimum == maximum and float(minimum).is_integer():
        yield "fraction"
    elif math.isfinite(minimum) and math.isfinite(maximum) and not _allows_integer(schema):
        yield "integer"
    for kind, keywords in (("string", "Length"), ("array", "Items"), ("object", "Properties")):
        if schema.get(f"min{keywords}", 0) > schema.get(f"max{keywords}", math.inf):
            yield kind
    if any(schema.get("properties", {}).get(name, True) is False for name in schema.get("required", ())):
        yield "object"


def _allows_integer(schema: Schema) -> bool:
    """Returns whether an integer lies within the bounds. The schema must have a lower and an upper one."""
    bounds = _with_integer_bounds(schema)
    return bool(bounds["minimum"] <= bounds["maximum"])


def _with_integer_bounds(schema: Schema) -> Schema:
    """Returns the schema with the least and the largest integer that its bounds allow as `minimum` and `maximum`, and
    without exclusive bounds."""
    result = {name: value for name, value in schema.items() if name not in ("exclusiveMinimum", "exclusiveMaximum")}
    lower = [math.ceil(schema["minimum"])] if "minimum" in schema else []
    lower += [math.floor(schema["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in schema else []
    upper = [math.floor(schema["maximum"])] if "maximum" in schema else []
    upper += [math.ceil(schema["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in schema else []
    return result | ({"minimum": max(lower)} if lower else {}) | ({"maximum": min(upper)} if upper else {})


def _with_max_items(schema: Schema) -> Schema:
    """Returns the schema with a `maxItems` that ends arrays before the first position at which no item is valid, i.e.
    whose entry in `prefixItems` or `items` is false."""
    entries = schema.get("prefixItems", [])
    length = entries.index(False) if False in entries else len(entries) if schema.get("items") is False else None
    if length is None:
        return schema
    schema = {**schema, "maxItems": min(length, schema.get("maxItems", length)), "prefixItems": entries[:length]}
    return schema if length else {name: value for name, value in schema.items() if name != "prefixItems"}
