"""Limits of stop strings, patterns and grammars in requests, each with its reason and its message. Nothing in this file
compiles or searches what a client sent."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from sglang.srt.sampling.quoted_text import without_classes

if sys.version_info >= (3, 11):
    from re import _constants as regex_codes  # type: ignore[attr-defined]
    from re import _parser as regex_parser  # type: ignore[attr-defined]
else:
    import sre_constants as regex_codes
    import sre_parse as regex_parser

MAX_STOP_STRINGS = 32
MAX_STOP_LENGTH = 1024
"""Characters of one stop string: the detokenizer keeps a table with as many entries for each sequence."""
MAX_STOP_REGEX_LENGTH = 2048
"""Characters of all `stop_regex` of a request together: they are parsed on the event loop."""
MAX_STOP_REGEX_NESTING = 32
MAX_STOP_REGEX_SIZE = 4096
"""Elements of all `stop_regex` of a request, with their required repetitions written out as the library compiles them:
about 250 bytes and 5 microseconds each."""

MAX_GRAMMAR_LENGTH = 256 * 1024
"""Characters of a grammar (json_schema, regex, ebnf, structural_tag) as it was sent."""
MAX_GRAMMAR_NESTING = 128
"""Nesting of objects, arrays and groups; compilation takes cubic time in it."""
MAX_SCHEMA_VALUES = 20_000
"""Objects, arrays, strings and numbers of a JSON schema or structural tag."""
MAX_ENUM = 4096
"""Values of one `enum`."""
MAX_REPETITION = 10_000
"""Any count that a grammar names (maxLength, minItems, {m,n}, ...), and the product of counts around each other."""

_GROUP = re.compile("[()]")


def verify_stop_strings(stop: Sequence[str]) -> None:
    """Checks the number and lengths of stop strings. Raises ValueError."""
    if len(stop) > MAX_STOP_STRINGS:
        raise ValueError(f"stop must have at most {MAX_STOP_STRINGS} strings, got {len(stop)}.")
    for text in stop:
        verify_unicode("stop", text)
        if len(text) > MAX_STOP_LENGTH:
            raise ValueError(
                f"A stop string must have at most {MAX_STOP_LENGTH} characters, got {len(text)}; its beginning will do."
            )


def verify_stop_patterns(patterns: Sequence[str]) -> None:
    """Checks syntax and size of stop_regex without compiling it. Raises ValueError."""
    if len(patterns) > MAX_STOP_STRINGS:
        raise ValueError(f"stop_regex must have at most {MAX_STOP_STRINGS} patterns, got {len(patterns)}.")
    length = sum(map(len, patterns))
    if length > MAX_STOP_REGEX_LENGTH:
        raise ValueError(f"stop_regex must have at most {MAX_STOP_REGEX_LENGTH} characters in all, got {length}.")
    size = 0
    for pattern in patterns:
        verify_unicode("stop_regex", pattern)
        nesting = group_nesting(pattern)
        if nesting > MAX_STOP_REGEX_NESTING:
            raise ValueError(f"stop_regex may nest {MAX_STOP_REGEX_NESTING} groups, got {nesting}; flatten it.")
        size += compiled_size(_parsed(pattern))
    if size > MAX_STOP_REGEX_SIZE:
        raise ValueError(
            f"stop_regex has {size:.6g} elements when its repetitions are written out, at most {MAX_STOP_REGEX_SIZE} "
            "are allowed; use smaller counts, or + and *."
        )


def verify_grammar_source(name: str, source: str) -> None:
    """Checks quickly what can be checked without parsing; the rest is checked before the grammar is compiled. Raises
    ValueError."""
    if len(source) > MAX_GRAMMAR_LENGTH:
        raise ValueError(f"{name} must have at most {MAX_GRAMMAR_LENGTH} characters, got {len(source)}; simplify it.")
    verify_unicode(name, source)


def verify_grammar_value(name: str, value: Any) -> None:
    """Checks the size of a grammar that is not encoded as text yet, looking at no more of it than may be. Raises
    ValueError."""
    num_values, num_chars, pending = 1, 0, [value]
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            num_chars += len(value)
        elif isinstance(value, dict | list):
            num_values += len(value)
            if num_values > MAX_SCHEMA_VALUES:
                raise ValueError(f"{name} has more than {MAX_SCHEMA_VALUES} values; simplify it.")
            if isinstance(value, dict):
                num_chars += sum(len(key) for key in value if isinstance(key, str))
            pending.extend(value.values() if isinstance(value, dict) else value)
        if num_chars > MAX_GRAMMAR_LENGTH:
            raise ValueError(f"{name} must have at most {MAX_GRAMMAR_LENGTH} characters; simplify it.")


def verify_unicode(name: str, text: str) -> None:
    """Raises ValueError for text with lone surrogates, which cannot be sent to the other processes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not valid Unicode: a lone surrogate at position {error.start}.") from None


def group_nesting(pattern: str) -> int:
    """Returns the depth to which the groups of a regular expression nest. Linear, without recursion, and also for
    invalid patterns."""
    return nesting(_GROUP, without_classes(pattern))


def nesting(brackets: re.Pattern[str], text: str) -> int:
    """Returns the depth to which brackets nest, of whatever kinds."""
    depth = deepest = 0
    for token in brackets.finditer(text):
        depth += 1 if token[0] in "([{" else -1
        deepest = max(deepest, depth)
    return deepest


def compiled_size(pattern: Any) -> int:
    """Returns the number of elements of a parsed pattern; an element that is required n times counts n times."""
    size = 0
    for code, argument in pattern:
        times, parts = 1, list(_subpatterns(argument))
        if code in _REPEATS:
            times = max(1, int(argument[0]))
        weight = len(argument) if code is regex_codes.IN else 1
        size += times * (weight + sum(map(compiled_size, parts)))
    return size


def longest_match(pattern: str) -> int:
    """Returns an upper bound of the characters of a match. Raises ValueError for an invalid pattern."""
    return int(_parsed(pattern).getwidth()[1])


def _parsed(pattern: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about style would fill the log
            return regex_parser.parse(pattern)
    except (re.error, OverflowError, ValueError) as error:
        raise ValueError(f"stop_regex is not a regular expression: {error}, got {pattern!r}.") from None


def _subpatterns(argument: Any) -> Iterator[Any]:
    if isinstance(argument, regex_parser.SubPattern):
        yield argument
    elif isinstance(argument, (tuple, list)):
        for part in argument:
            yield from _subpatterns(part)


_REPEATS = frozenset(
    code
    for name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")
    if (code := getattr(regex_codes, name, None)) is not None
)
