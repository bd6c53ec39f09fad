"""Refuses JSON schemas of which a library would ignore a part, as an answer would then not have to be valid.

xgrammar ignores what it cannot express; llguidance reports it itself, with one exception. The cases here were found by
comparing their grammars with a validator (`test/schemas`). `format` is an annotation unless a validator is told
otherwise, and is refused nowhere.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

from sglang.srt.constrained.exclusive_schemas import exclusive, schema_types
from sglang.srt.constrained.schema_places import ROOT, Place

Schema = dict[str, Any]

_NEVER = ("uniqueItems", "not", "contains", "dependentRequired", "dependentSchemas", "dependencies", "if")
_ALONE = ("$ref", "anyOf", "oneOf", "allOf")
"""Keywords that make the library ignore all others beside them."""
ANNOTATIONS = frozenset(
    "title description default examples deprecated readOnly writeOnly nullable discriminator format contentEncoding "
    "contentMediaType contentSchema $schema $id $anchor $comment $defs definitions $vocabulary".split()
)
"""Keywords that forbid nothing and may stand beside anything, as may names that begin with `x-`."""
_KEYWORDS_OF = {
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern"),
    "array": ("minItems", "maxItems"),
    "object": ("required", "minProperties", "maxProperties"),
}
"""Keywords that are read only if `type` names this type; `properties` implies it for objects, `items` for arrays."""
_SUBSCHEMAS = ("additionalProperties", "items", "propertyNames", "unevaluatedItems", "unevaluatedProperties")
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_NEXT_TO_0 = 1e-16
_ENDLESS_LENGTH = 1024
"""A length limit for texts with a format that answers do not come near."""


class InexpressibleSchema(ValueError):
    """Raised for a schema that cannot be enforced. The message names the keyword and its place."""


def check_keywords(schema: Any) -> None:
    """Raises InexpressibleSchema if xgrammar would ignore a part. The caller has limited the nesting and size of
    `schema`."""
    pending: list[tuple[Place, Any]] = [(ROOT, schema)]
    while pending:
        place, entry = pending.pop()
        if isinstance(entry, dict):
            reason = next(_reasons(entry), None)
            if reason is not None:
                raise InexpressibleSchema(
                    f"{reason} at {place} cannot be enforced; leave it out and check the answer, or say it otherwise"
                )
            pending += _parts(place, entry)


def _parts(place: Place, schema: Schema) -> Iterator[tuple[Place, Any]]:
    for name in _SUBSCHEMAS:
        part = schema.get(name)
        if name == "propertyNames" and isinstance(part, dict):
            part = {"type": "string", **part}
        yield place / name, part
    for name in _LISTS_OF_SCHEMAS:
        if isinstance(schema.get(name), list):
            yield from ((place / name / i, part) for i, part in enumerate(schema[name]))
    for name in _MAPS_OF_SCHEMAS:
        if isinstance(schema.get(name), dict):
            yield from ((place / name / key, part) for key, part in schema[name].items())


def is_inexpressible(schema: Schema) -> bool:
    """Returns whether xgrammar would ignore something in this part."""
    return next(_reasons(schema), None) is not None


def _reasons(schema: Schema) -> Iterator[str]:
    for name in _NEVER:
        if schema.get(name) not in (None, False, {}, []) or (name == "not" and name in schema):
            yield f'"{name}"'
    yield from _keywords_beside_lone_ones(schema)
    yield from _values(schema)
    yield from _untyped(schema)
    types = schema_types(schema)
    if "multipleOf" in schema and "number" in types:
        yield 'a "multipleOf" of a number (of an integer it can)'
    if "pattern" in schema and ("minLength" in schema or "maxLength" in schema):
        yield 'a length beside "pattern"'
    if "format" in schema and (
        schema.get("maxLength", _ENDLESS_LENGTH) < _ENDLESS_LENGTH or schema.get("minLength", 0) > 1
    ):
        yield 'a length beside "format"'
    yield from _names(schema)
    if len(schema.get("allOf", ())) > 1:
        yield '"allOf" of several schemas'
    if "oneOf" in schema and not exclusive(schema["oneOf"]):
        yield '"oneOf" whose schemas are not told apart by their types or a required constant ("anyOf" can)'


def _with_inclusive_bounds(schema: Schema) -> Schema:
    """Replaces excluded bounds that llguidance would allow: whole numbers less than one from the other bound. The next
    number that a double can hold takes the place of such a bound, except around 0, where the library cannot write
    numbers that small."""
    low, high = _bounds(schema, "minimum", "exclusiveMinimum"), _bounds(schema, "maximum", "exclusiveMaximum")
    if not (low and high and min(high) - max(low) < 1) or schema_types(schema) == ["integer"]:
        return schema
    schema = dict(schema)
    for name, inclusive, end, tightest in (
        ("exclusiveMinimum", "minimum", math.inf, max),
        ("exclusiveMaximum", "maximum", -math.inf, min),
    ):
        bound = schema.get(name)
        if isinstance(bound, int | float) and float(bound).is_integer():
            next_to_it = math.nextafter(bound, end) if bound else math.copysign(_NEXT_TO_0, end)
            schema[inclusive] = tightest(next_to_it, schema.get(inclusive, next_to_it))
            del schema[name]
    return schema


def _bounds(schema: Schema, *names: str) -> list[float]:
    return [schema[name] for name in names if isinstance(schema.get(name), int | float)]


def _constraints(schema: Schema) -> set[str]:
    return {name for name in schema if name not in ANNOTATIONS and not name.startswith("x-")}


def _keywords_beside_lone_ones(schema: Schema) -> Iterator[str]:
    for name in _ALONE:
        others = sorted(_constraints(schema) - {name})
        if name in schema and others:
            yield f'"{others[0]}" beside "{name}"'


def _values(schema: Schema) -> Iterator[str]:
    """Converts `enum` and `const`, beside which the library reads nothing, and need not if the type allows every
    value."""
    for name in ("enum", "const"):
        if name not in schema:
            continue
        others = sorted(_constraints(schema) - {name, "type"})
        if others:
            yield f'"{others[0]}" beside "{name}"'
        values = schema[name] if name == "enum" else [schema[name]]
        if "type" in schema and not all(_is_of(value, schema_types(schema)) for value in values):
            yield f'a value of "{name}" that "type" forbids'


def _is_of(value: Any, types: list[str]) -> bool:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    names = {
        "null": value is None,
        "boolean": isinstance(value, bool),
        "integer": whole and not isinstance(value, bool),
        "number": isinstance(value, (int, float)) and not isinstance(value, bool),
        "string": isinstance(value, str),
        "array": isinstance(value, list),
        "object": isinstance(value, dict),
    }
    return any(names.get(name, False) for name in types)


def _untyped(schema: Schema) -> Iterator[str]:
    if "type" in schema:
        return
    known = {"object"} if "properties" in schema else {"array"} if {"items", "prefixItems"} & set(schema) else set()
    for kind, keywords in _KEYWORDS_OF.items():
        for name in keywords:
            if name in schema and kind not in known:
                yield f'"{name}" without "type"'


def _names(schema: Schema) -> Iterator[str]:
    properties, patterns = schema.get("properties") or {}, schema.get("patternProperties") or {}
    if properties and patterns:
        yield '"patternProperties" beside "properties"'
    closed = schema.get("additionalProperties", True) is False
    missing = [name for name in schema.get("required") or () if name not in properties]
    if missing and not closed:
        yield f'"required" of {missing[0]!r}, which is not among "properties",'


_UNKNOWN_TO_LLGUIDANCE = (*_NEVER, "propertyNames", "unevaluatedProperties")


def is_unknown_to_llguidance(schema: Schema) -> bool:
    """Returns whether the library refuses a keyword of this part, or of a part joined with it."""
    pending: list[Any] = [schema]
    while pending:
        part = pending.pop()
        if not isinstance(part, dict):
            continue
        if any(part.get(name) not in (None, {}, []) for name in _UNKNOWN_TO_LLGUIDANCE) or "not" in part:
            return True
        if "oneOf" in part and not exclusive(part["oneOf"]):
            return True
        if _is_joined(part):
            pending += [entry for name in _ALONE[1:] for entry in part.get(name, ())]
    return False


def for_llguidance(schema: Schema, formats: Collection[str]) -> Schema:
    """Returns a copy of `schema` that means to llguidance what it means to xgrammar: only `formats` are kept, as it
    refuses others, and objects get only the named properties, unless the schema says more about them or joins schemas.
    The caller has limited nesting and size."""
    closes = not any(_is_joined(part) for part in _all_parts(schema))

    def change(_: Place, part: Schema) -> Schema:
        part = {name: value for name, value in part.items() if name != "format" or value in formats or not value}
        part = _with_inclusive_bounds(part)
        return {**part, "additionalProperties": False} if closes and names_all(part) else part

    return with_parts(schema, change)


def with_parts(schema: Any, change: Callable[[Place, Schema], Schema | bool]) -> Any:
    """Returns a copy of `schema` in which `change` (of a part's place and the part) replaces each part, outermost
    first. Nesting and size of the result must be limited."""
    copied: Schema = {"#": schema}
    pending: list[tuple[Place, Any, Any]] = [(ROOT, copied, "#")]
    while pending:
        place, parent, key = pending.pop()
        if not isinstance(parent[key], dict):
            continue
        part = parent[key] = change(place, parent[key])
        if isinstance(part, bool):
            continue
        part = parent[key] = dict(part)
        pending += [(place / name, part, name) for name in _SUBSCHEMAS if name in part]
        for name in (*_LISTS_OF_SCHEMAS, *_MAPS_OF_SCHEMAS):
            if isinstance(part.get(name), list):
                part[name] = list(part[name])
                pending += [(place / name / i, part[name], i) for i in range(len(part[name]))]
            elif isinstance(part.get(name), dict):
                part[name] = dict(part[name])
                pending += [(place / name / entry, part[name], entry) for entry in part[name]]
    return copied["#"]


def _all_parts(schema: Any) -> Iterator[Schema]:
    pending = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            yield part
            pending += [entry for _, entry in _parts(ROOT, part)]


def _is_joined(part: Schema) -> bool:
    """Returns whether one object must satisfy several schemas, which may each name other properties."""
    return next(_keywords_beside_lone_ones(part), None) is not None or len(part.get("allOf") or ()) > 1


def names_all(part: Schema) -> bool:
    """Returns whether the schema names properties, includes all required ones, and says nothing about others."""
    if not isinstance(part.get("properties"), dict) or any(name in part for name in _OTHER_PROPERTIES):
        return False
    return all(name in part["properties"] for name in part.get("required") or ())


_OTHER_PROPERTIES = (
    "additionalProperties",
    "patternProperties",
    "propertyNames",
    "unevaluatedProperties",
    "minProperties",
)


def answer_schemas(tag: Any) -> Iterator[Schema]:
    """Yields the parts of a structural tag with a `json_schema`, except those of calls (in `tags`): functions' schemas
    use keywords of all kinds, and a function checks its arguments."""
    pending = [tag]
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending += part
        elif isinstance(part, dict) and part.get("type") == "json_schema":
            yield part
        elif isinstance(part, dict):
            pending += [value for name, value in part.items() if name != "tags"]


_LIMITED_TEXT = re.compile(r'^(\w+) ::= \(\(\[\^\\"\\\\\\r\\n\]\)\)$', re.MULTILINE)
_USE = re.compile(r'"\\"" (\w+)\{(\d+), (-?\d+)\} "\\""')
_SHORT_ESCAPE = re.compile(r"(\\\\)|\\x([0-9a-fA-F]{2})")
"""The library prints a byte's two digits, and reads as many as follow."""
_PLAIN = r"[^\0-\x1f\"\\\ud800-\udfff]"


def repair_limited_texts(grammar: str) -> str:
    """Returns `grammar`, in EBNF as the library prints it, with the characters that JSON allows in texts of limited
    length.

    The library allows control characters and halves of surrogate pairs there, and forbids escapes. One rule for both
    kinds of characters would have the library look at every token of the vocabulary for every mask (2.6 ms for one of
    4,096 tokens, against 0.05 ms), so a text is one without escapes, or begins with a stretch without them.
    """
    names = _LIMITED_TEXT.findall(grammar)
    if not names:
        return grammar
    limited = set(names)
    grammar = _LIMITED_TEXT.sub(lambda match: f"{match[1]} ::= (({_PLAIN}))", grammar)
    grammar = _USE.sub(
        lambda use: _text(use[1], int(use[2]), int(use[3])) if use[1] in limited else use[0],
        grammar,
    )
    grammar += "".join(f'\n{name}_any ::= (({_PLAIN}) | ("\\\\" basic_escape))\n' for name in names)
    return _SHORT_ESCAPE.sub(lambda match: match[1] or f"\\u00{match[2]}", grammar)


def _text(name: str, minimum: int, maximum: int) -> str:
    """Returns rules of a text of `minimum` to `maximum` characters (-1: any number). Its first escape is in the first
    half."""
    plain = f'"\\"" {name}{{{minimum}, {maximum}}} "\\""'
    if maximum == 0:
        return plain
    before = maximum if maximum < 0 else min(maximum // 2, maximum - minimum)
    left = maximum if maximum < 0 else maximum - before - 1
    rest = f"{name}_any{{{max(0, minimum - 1)}, {left}}}" if left else ""
    return f'(({plain}) | ("\\"" {name}{{0, {before}}} "\\\\" basic_escape {rest} "\\""))'
