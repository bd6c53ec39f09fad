"""Complements of JSON schema keywords, one at a time, as plain schemas."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from sglang.srt.constrained.plain_schemas import (
    ATOMS,
    INEXPRESSIBLE,
    NUMBER,
    Schema,
    SizedPattern,
    atom_of,
    atoms,
    kinds_of,
)

MAX_TEXTS = 32
_ANY_CHARACTER = r"[\s\S]"
_SPECIAL = frozenset("\\^$.|?*+()[]{}-/&~#")


def inexpressible(keyword: str, kinds: Iterable[str]) -> Schema:
    """Returns a schema that stands for values which cannot be described; it is harmless where other schemas exclude its
    types."""
    return {"type": list(kinds), INEXPRESSIBLE: keyword}


_BEYOND: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "minimum": ("exclusiveMaximum", 0, NUMBER),
    "maximum": ("exclusiveMinimum", 0, NUMBER),
    "exclusiveMinimum": ("maximum", 0, NUMBER),
    "exclusiveMaximum": ("minimum", 0, NUMBER),
    "minLength": ("maxLength", -1, ("string",)),
    "maxLength": ("minLength", 1, ("string",)),
    "minItems": ("maxItems", -1, ("array",)),
    "maxItems": ("minItems", 1, ("array",)),
    "minProperties": ("maxProperties", -1, ("object",)),
    "maxProperties": ("minProperties", 1, ("object",)),
}
"""The keyword for the values beyond each bound, its offset, and the types that it restricts."""


def _beyond(keyword: str, bound: Any) -> list[Schema]:
    other_side, step, kinds = _BEYOND[keyword]
    return [] if step and bound + step < 0 else [{"type": list(kinds), other_side: bound + step}]


def other_types(types: Any) -> list[Schema]:
    """Returns schemas of the values of all types that are not in `types`."""
    allowed = atoms(types)
    return [{"type": kinds}] if (kinds := [atom for atom in ATOMS if atom not in allowed]) else []


def missing_names(names: list[str]) -> list[Schema]:
    """Returns schemas of the objects that lack one of `names`."""
    return [{"type": ["object"], "properties": {name: False}} for name in names]


def other_values(values: list[Any]) -> list[Schema]:
    """Returns schemas of all values except `values`."""
    of: dict[str, list[Any]] = {atom: [] for atom in ATOMS}
    for value in values:
        of[atom_of(value)].append(value)
    results: list[Schema] = []
    if not of["null"]:
        results.append({"type": ["null"]})
    if booleans := [value for value in (False, True) if value not in of["boolean"]]:
        results.append({"type": ["boolean"], "enum": booleans})
    results += _other_numbers(sorted({*of["integer"], *of["fraction"]}))
    results += _other_texts(of["string"])
    for kind in ("array", "object"):
        results.append(inexpressible("enum", [kind]) if of[kind] else {"type": [kind]})
    return results


def _other_numbers(numbers: list[Any]) -> Iterator[Schema]:
    for low, high in itertools.pairwise([None, *numbers, None]):
        lower = {} if low is None else {"exclusiveMinimum": low}
        yield {"type": list(NUMBER), **lower, **({} if high is None else {"exclusiveMaximum": high})}


def _other_texts(texts: list[str]) -> Iterator[Schema]:
    """Yields schemas of all other texts: those of other lengths, and for each length a pattern. Grammars see texts as
    they are written, so only texts with a single spelling (apart from `\\u`) can be excluded."""
    if len(texts) > MAX_TEXTS or not all(" " <= c <= "\uffff" and c not in '"\\' for text in texts for c in text):
        yield inexpressible("enum", ["string"])
        return
    lengths = sorted({len(text) for text in texts})
    for low, high in itertools.pairwise([-1, *lengths, None]):
        assert low is not None
        if high is None or high - low > 1:
            yield {"type": ["string"], "minLength": low + 1, **({} if high is None else {"maxLength": high - 1})}
    for length in lengths:
        if length:
            pattern = _other_pattern([text for text in texts if len(text) == length], length)
            yield {
                "type": ["string"],
                "pattern": SizedPattern(f"^({pattern})$"),
                "minLength": length,
                "maxLength": length,
            }


def _other_pattern(texts: list[str], length: int) -> str:
    """Returns a pattern of the texts of `length` characters, at least one, that are not in `texts`."""
    starts = sorted({text[0] for text in texts})
    free = f"[^{''.join(map(_escaped, starts))}]" + _ANY_CHARACTER * (length - 1)
    if length == 1:
        return free
    rests = {start: [text[1:] for text in texts if text[0] == start] for start in starts}
    return "|".join([free, *(f"{_escaped(c)}({_other_pattern(rest, length - 1)})" for c, rest in rests.items())])


def _escaped(character: str) -> str:
    return f"\\{character}" if character in _SPECIAL else character


def other(keyword: str, value: Any) -> list[Schema]:
    """Returns schemas of the values that a keyword of a plain schema forbids, for keywords without schemas in them."""
    if keyword in _BEYOND:
        return _beyond(keyword, value)
    simple: dict[str, Callable[[Any], list[Schema]]] = {
        "type": other_types,
        "enum": other_values,
        "const": lambda constant: other_values([constant]),
        "required": missing_names,
    }
    return simple[keyword](value) if keyword in simple else [inexpressible(keyword, kinds_of(keyword))]
