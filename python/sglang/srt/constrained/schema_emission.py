"""Converts plain schemas to JSON schemas that grammar libraries accept."""

from __future__ import annotations

import math

from sglang.srt.constrained.plain_schemas import (
    BOUNDS,
    INEXPRESSIBLE,
    NUMBER,
    Schema,
    SizedPattern,
    Unwritable,
    simplified,
    type_names,
)
from sglang.srt.constrained.schema_keywords import ANNOTATIONS, names_all

MAX_FRACTION_RANGES = 16
"""Most ranges between neighbouring integers in which fractions are written."""


def emitted(leaf: Schema) -> list[Schema]:
    """Returns JSON schemas whose union is a plain schema. Raises Unwritable."""
    if INEXPRESSIBLE in leaf:
        raise Unwritable(f'"{leaf[INEXPRESSIBLE]}" within "not", "if" or "oneOf"')
    kinds = leaf["type"]
    if "enum" in leaf:
        return [{name: value for name, value in leaf.items() if name != "type"}]
    if "fraction" in kinds and "integer" not in kinds:
        rest = [kind for kind in kinds if kind != "fraction"]
        others = simplified({**leaf, "type": rest}) if rest else None
        return [*_fractions(leaf), *(emitted(others) if others is not None else [])]
    sized = isinstance(leaf.get("pattern"), SizedPattern)
    said = ("type", "minLength", "maxLength") if sized else ("type",)
    form = {name: value for name, value in leaf.items() if name not in said}
    form |= {"pattern": str(leaf["pattern"])} if sized else {}
    names = type_names(kinds)
    return [without_absent({**form, **({} if names is None else {"type": names})})]


def _fractions(leaf: Schema) -> list[Schema]:
    """Returns schemas of the numbers that are not integers, one for each pair of integers around them."""
    numbers = {name: value for name, value in leaf.items() if name in BOUNDS}
    low = max(numbers.get("minimum", -math.inf), numbers.get("exclusiveMinimum", -math.inf))
    high = min(numbers.get("maximum", math.inf), numbers.get("exclusiveMaximum", math.inf))
    if not high - low <= MAX_FRACTION_RANGES or "multipleOf" in leaf:
        raise Unwritable("numbers that are no integers")
    ranges: list[Schema] = []
    for below in range(math.floor(low), math.ceil(high)):
        between = {"type": list(NUMBER), "exclusiveMinimum": below, "exclusiveMaximum": below + 1}
        bounds = simplified({**between, **_tighter(between, numbers)})
        if bounds is not None:
            ranges.append({**bounds, "type": "number"})
    return ranges


def _tighter(between: Schema, numbers: Schema) -> Schema:
    """Returns the tighter bound of both schemas for each side."""
    bounds: Schema = {}
    for inclusive, exclusive_, best in (("minimum", "exclusiveMinimum", max), ("maximum", "exclusiveMaximum", min)):
        values = [schema[name] for schema in (between, numbers) for name in (inclusive, exclusive_) if name in schema]
        tightest = best(values)
        excluded = any(schema.get(exclusive_) == tightest for schema in (between, numbers))
        bounds[exclusive_ if excluded else inclusive] = tightest
    return bounds


def with_named_patterns(leaf: Schema) -> Schema:
    """Rewrites a rule for property names as rules for the properties with such names."""
    names = leaf.get("propertyNames")
    if not isinstance(names, dict) or any(name in leaf for name in ("properties", "patternProperties")):
        return leaf
    rule = {name: value for name, value in names.items() if name not in ANNOTATIONS and (name, value) != _OF_NAMES}
    others = leaf.get("additionalProperties", True)
    leaf = {**leaf, "additionalProperties": False}
    del leaf["propertyNames"]
    if rule.keys() == {"pattern"}:
        return {**leaf, "patternProperties": {rule["pattern"]: others}}
    if rule.keys() in ({"enum"}, {"const"}):
        allowed = rule.get("enum") or [rule["const"]]
        return {**leaf, "properties": {name: others for name in allowed if isinstance(name, str)}}
    raise Unwritable('"propertyNames" with other rules than a pattern or names')


_OF_NAMES = ("type", "string")


def without_absent(form: Schema) -> Schema:
    """Returns the schema without properties that must be absent, if only named properties are allowed."""
    properties = form.get("properties", {})
    if False not in properties.values():
        return form
    if not _is_closed(form):
        raise Unwritable("properties that must be absent, of an object that may have others")
    there = {name: schema for name, schema in properties.items() if schema is not False}
    if not there and "additionalProperties" not in form:
        raise Unwritable("an object of which is only known what it must not have")
    return {**form, "properties": there, "additionalProperties": False}


def _is_closed(form: Schema) -> bool:
    return form.get("additionalProperties", True) is False or names_all(form)
