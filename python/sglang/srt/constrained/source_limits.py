"""Checks of a grammar's source before compilation: limits (`sampling.limits`), and references to outside of it."""

from __future__ import annotations

import json
import re
from typing import Any

from sglang.srt.constrained.grammar import ANY_JSON, GrammarError, GrammarKey
from sglang.srt.sampling.grammar_names import client_name
from sglang.srt.sampling.limits import (
    MAX_ENUM,
    MAX_GRAMMAR_NESTING,
    MAX_REPETITION,
    MAX_SCHEMA_VALUES,
    nesting,
)
from sglang.srt.sampling.quoted_text import without_classes, without_ebnf_quotes, without_json_strings

_COUNTS = frozenset(
    ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains")
)
_REFERENCES = frozenset(("$ref", "$dynamicRef", "$recursiveRef"))
_LITERALS = frozenset(("enum", "const", "default", "examples"))
"""Keys whose lists are data, so that a "$ref" in them is not a reference. An object under such a name may be a
property's schema, however."""

_JSON_BRACKET = re.compile(r"[\[\]{}]")
_GROUP = re.compile("[()]")
_REGEX_COUNT = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_EBNF_COUNT = re.compile(r"\{\s*(\d+)\s*(?:,\s*(?:(\d+)\s*)?)?\}")


def check_source(key: GrammarKey) -> None:
    """Raises GrammarError for a source that exceeds a limit. Takes milliseconds, so do not call it on the event
    loop."""
    if key.kind == "regex":
        _check_regex(key.source)
    elif key.kind == "ebnf":
        _check_ebnf(key.source)
    elif key.source != ANY_JSON:
        _check_json(client_name(*key), key.source)


def _check_json(kind: str, source: str) -> None:
    depth = nesting(_JSON_BRACKET, without_json_strings(source))
    if depth > MAX_GRAMMAR_NESTING:
        raise GrammarError(
            f"{kind} nests {depth} objects and arrays, at most {MAX_GRAMMAR_NESTING} are allowed; make it flatter, "
            'or let it refer to itself with "$ref".'
        )
    try:
        value = json.loads(source)
    except ValueError as error:
        raise GrammarError(f"invalid {kind}: it is not JSON: {error}") from None
    num_values = 0
    pending: list[tuple[Any, bool]] = [(value, False)]
    while pending:
        value, is_literal = pending.pop()
        num_values += 1
        if num_values > MAX_SCHEMA_VALUES:
            raise GrammarError(f"{kind} has more than {MAX_SCHEMA_VALUES} values; simplify it.")
        if isinstance(value, list):
            pending.extend((entry, is_literal) for entry in value)
        elif isinstance(value, dict):
            for name, entry in value.items():
                if not is_literal:
                    _check_member(name, entry)
                pending.append((entry, is_literal or (name in _LITERALS and not isinstance(entry, dict))))


def _check_member(name: str, value: Any) -> None:
    """Checks one member of an object. A value of the type that the key expects is treated as that keyword, wherever it
    is."""
    if name in _REFERENCES and isinstance(value, str):
        if value != "#" and not value.startswith("#/"):
            raise GrammarError(
                f'{name} of "{value:.200}": only references inside of the schema are followed ("#" or "#/$defs/name"); '
                "put the definition into the schema."
            )
    elif name == "enum" and isinstance(value, list):
        if len(value) > MAX_ENUM:
            raise GrammarError(f"An enum must have at most {MAX_ENUM} values, got {len(value)}; use a pattern.")
    elif name in _COUNTS and isinstance(value, int | float):
        _check_count(name, value)
    elif name == "pattern" and isinstance(value, str):
        _check_regex(value)
    elif name == "patternProperties" and isinstance(value, dict):
        for pattern in value:
            _check_regex(pattern)
    elif name == "grammar" and isinstance(value, str):
        _check_ebnf(value)


def _check_regex(source: str) -> None:
    _check("A regular expression", without_classes(source), _REGEX_COUNT)


def _check_ebnf(source: str) -> None:
    _check("A grammar", without_ebnf_quotes(source), _EBNF_COUNT)


def _check(what: str, source: str, counts: re.Pattern[str]) -> None:
    """Checks groups and counts of a source without its quotes."""
    depth = nesting(_GROUP, source)
    if depth > MAX_GRAMMAR_NESTING:
        raise GrammarError(
            f"{what} may nest {MAX_GRAMMAR_NESTING} groups, got {depth}; flatten it, or give its parts names."
        )
    for match in counts.finditer(source):
        _check_counts(what, match)


def _check_counts(what: str, match: re.Match[str]) -> None:
    for count in match.groups():
        if count:
            _check_count(f"{what}'s count in braces", float(count[:32]))


def _check_count(name: str, count: float) -> None:
    if count > MAX_REPETITION:
        raise GrammarError(
            f"{name} must be at most {MAX_REPETITION}, got {min(count, 1e18):g}; leave it out to allow any number."
        )
