"""Complements of single JSON schema keywords: the values that `{keyword: value}` forbids, as a list of plain schemas
(`plain_schemas`). A value is forbidden if it satisfies at least one of them.

Example: {"minimum": 3} has the complement [{"type": ["integer", "fraction"], "exclusiveMaximum": 3}].
"""

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
"""Most strings of an `enum` or `const` whose complement is written."""
MAX_TEXT_LENGTH = 128
"""Most characters of each. A pattern takes six times their square, and nests as deep as strings are long."""
_ANY_CHARACTER = r"[\s\S]"
_SPECIAL = frozenset("\\^$.|?*+()[]{}-/&~#")
"""Characters that are escaped in patterns."""


def inexpressible(keyword: str, kinds: Iterable[str]) -> Schema:
    """Returns a placeholder for the part of a keyword's complement that no plain schema describes: values of the types
    `kinds`. It does no harm if an intersection with schemas of other types removes it; if it remains, the schema cannot
    be rewritten."""
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
"""For each bound, the opposite bound that all values beyond it satisfy: its keyword, the difference of its value from
the first one, and the types that both restrict."""


def _beyond(keyword: str, bound: Any) -> list[Schema]:
    """Returns schemas of the values beyond a bound; none if these would have a negative length."""
    opposite, step, kinds = _BEYOND[keyword]
    return [] if step and bound + step < 0 else [{"type": list(kinds), opposite: bound + step}]


def other_types(types: Any) -> list[Schema]:
    """Returns schemas of the values of all types that are not in `types`."""
    allowed = atoms(types)
    return [{"type": kinds}] if (kinds := [atom for atom in ATOMS if atom not in allowed]) else []


def missing_names(names: list[str]) -> list[Schema]:
    """Returns schemas of the objects that lack one or more of `names`: a schema for each name."""
    return [{"type": ["object"], "properties": {name: False}} for name in names]


def other_values(values: list[Any]) -> list[Schema]:
    """Returns schemas of all values except `values`."""
    by_type: dict[str, list[Any]] = {atom: [] for atom in ATOMS}
    for value in values:
        by_type[atom_of(value)].append(value)
    results: list[Schema] = []
    if not by_type["null"]:
        results.append({"type": ["null"]})
    if booleans := [value for value in (False, True) if value not in by_type["boolean"]]:
        results.append({"type": ["boolean"], "enum": booleans})
    results += _other_numbers(sorted({*by_type["integer"], *by_type["fraction"]}))
    results += _other_texts(by_type["string"])
    for kind in ("array", "object"):
        results.append(inexpressible("enum", [kind]) if by_type[kind] else {"type": [kind]})
    return results


def _other_numbers(numbers: list[Any]) -> Iterator[Schema]:
    """Yields schemas of all other numbers: those between neighbours of the ascending `numbers`, and on either side."""
    for low, high in itertools.pairwise([None, *numbers, None]):
        lower = {} if low is None else {"exclusiveMinimum": low}
        yield {"type": list(NUMBER), **lower, **({} if high is None else {"exclusiveMaximum": high})}


def _other_texts(texts: list[str]) -> Iterator[Schema]:
    """Yields schemas of all other strings: those of other lengths, and a pattern for each length in `texts`. A grammar
    constrains JSON text, so it can exclude a string only if JSON has a single way to write it (apart from `\\u`
    escapes, which are left out of account). If some string has several, the result is a placeholder."""
    too_much = len(texts) > MAX_TEXTS or max(map(len, texts), default=0) > MAX_TEXT_LENGTH
    if too_much or not all(" " <= c <= "\uffff" and c not in '"\\' for text in texts for c in text):
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
    """Returns a pattern of the strings of `length` characters that are not in `texts`. All texts have this length, at
    least 1."""
    starts = sorted({text[0] for text in texts})
    other_start = f"[^{''.join(map(_escaped, starts))}]" + _ANY_CHARACTER * (length - 1)
    if length == 1:
        return other_start
    rests = {start: [text[1:] for text in texts if text[0] == start] for start in starts}
    return "|".join([other_start, *(f"{_escaped(c)}({_other_pattern(rest, length - 1)})" for c, rest in rests.items())])


def _escaped(character: str) -> str:
    return f"\\{character}" if character in _SPECIAL else character


def other(keyword: str, value: Any) -> list[Schema]:
    """Returns schemas of the values that `{keyword: value}` forbids. The keyword's value must not contain schemas. For
    a keyword that is not known here the result is a placeholder (`inexpressible`)."""
    if keyword in _BEYOND:
        return _beyond(keyword, value)
    simple: dict[str, Callable[[Any], list[Schema]]] = {
        "type": other_types,
        "enum": other_values,
        "const": lambda constant: other_values([constant]),
        "required": missing_names,
    }
    return simple[keyword](value) if keyword in simple else [inexpressible(keyword, kinds_of(keyword))]
