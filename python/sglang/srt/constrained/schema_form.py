"""Check that a value is a JSON schema at all, and that its keywords' values have a meaning (no unknown types, for
example).

It does not check whether a grammar could enforce it, and ignores annotations and unknown keywords.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from sglang.srt.constrained.schema_places import ROOT, Place

_TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))


def check_form(schema: Any) -> None:
    """Raises ValueError with the place of the first mistake. Takes about a microsecond a value."""
    pending: list[tuple[Place, Any]] = [(ROOT, schema)]
    while pending:
        place, entry = pending.pop()
        if isinstance(entry, dict):
            for name, value in entry.items():
                form = _FORMS.get(name)
                if form is not None:
                    wanted, is_right, parts = form
                    if not is_right(value):
                        raise ValueError(f'"{name}" at {place} must be {wanted}')
                    pending += parts(place / name, value)
        elif not isinstance(entry, bool):
            raise ValueError(f"{place} must be a schema: an object, true or false")


_Parts = Iterator[tuple[Place, Any]]
_Form = tuple[str, Callable[[Any], bool], Callable[[Place, Any], _Parts]]
"""The form of a keyword: what its value must be, a check of it, and the schemas in it."""


def _none(place: Place, value: Any) -> _Parts:
    return iter(())


def _one(place: Place, value: Any) -> _Parts:
    yield place, value


def _several(place: Place, value: Any) -> _Parts:
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    return ((place / name, part) for name, part in entries)


def _one_or_several(place: Place, value: Any) -> _Parts:
    return _several(place, value) if isinstance(value, list) else _one(place, value)


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) and value else [value]
    return all(isinstance(name, str) and name in _TYPES for name in names)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value % 1 == 0


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


_KEYWORDS: tuple[tuple[str, _Form], ...] = (
    ("type", (f"one of {', '.join(sorted(_TYPES))}, or a list of them", _is_type, _none)),
    ("required", ("a list of texts", _are_texts, _none)),
    ("enum", ("a list", _is(list), _none)),
    ("pattern $ref", ("a text", _is(str), _none)),
    ("uniqueItems", ("true or false", _is(bool), _none)),
    ("multipleOf", ("a number above 0", lambda value: _is_number(value) and value > 0, _none)),
    ("minimum maximum exclusiveMinimum exclusiveMaximum", ("a number", _is_number, _none)),
    (
        "minLength maxLength minItems maxItems minProperties maxProperties minContains maxContains",
        ("a whole number of at least 0", _is_count, _none),
    ),
    ("items", ("a schema", _is(dict, bool, list), _one_or_several)),
    (
        "additionalProperties contains else if not propertyNames then unevaluatedItems unevaluatedProperties",
        ("a schema", _is(dict, bool), _one),
    ),
    (
        "$defs definitions dependentSchemas patternProperties properties",
        ("an object of schemas", _is(dict), _several),
    ),
    (
        "allOf anyOf oneOf prefixItems",
        ("a list of schemas, not empty", lambda value: isinstance(value, list) and bool(value), _several),
    ),
)
_FORMS: dict[str, _Form] = {name: form for names, form in _KEYWORDS for name in names.split()}
