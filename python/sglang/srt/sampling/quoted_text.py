"""Blanks what is quoted in grammars, so that brackets and counts in it do not count.

One pass, whatever the text: a regular expression for a whole quote, `"(?:[^"\\\\]|\\\\.)*"`, keeps memory for each
character, and searches to the end of the text for each quote that does not end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

Closings = Mapping[str, "re.Pattern[str]"]
"""First character of an opening -> the pattern that finds in a quote: escapes, and with the group `end` its end. Any
other match shows that the quote has no end."""


def without_quotes(text: str, opening: re.Pattern[str], closings: Closings) -> str:
    """Returns the text with a space for each quote. opening: finds beginnings of quotes, and of what is left out by
    itself, which has no entry in `closings`. A beginning without an end is ordinary text."""
    kept: list[str] = []
    no_end_before = dict.fromkeys(closings, 0)
    position = 0
    while (begin := opening.search(text, position)) is not None:
        kept.append(text[position : begin.start()])
        kind, position = begin[0][0], begin.end()
        if kind in closings:
            stop, has_end = no_end_before[kind], False
            if position > stop:
                stop, has_end = _end(text, position, closings[kind])
            if not has_end:  # the same holds for later beginnings of the kind up to `stop`
                no_end_before[kind] = stop
                position = begin.start() + 1
                kept.append(kind)
                continue
            position = stop
        kept.append(" ")
    kept.append(text[position:])
    return "".join(kept)


def _end(text: str, position: int, closing: re.Pattern[str]) -> tuple[int, bool]:
    """Returns the end of a quote whose content begins at `position`, and True; if it has none, where the search
    stopped, and False."""
    while (match := closing.search(text, position)) is not None:
        if match["end"] is not None:
            return match.end(), True
        if match[0][0] != "\\":
            return match.start(), False
        position = match.end()
    return len(text), False


_REGEX_OPENING = re.compile(r"\\.|\[\^?\]?", re.DOTALL)
_CLASS_END = re.compile(r"\\.|(?P<end>\])", re.DOTALL)


def without_classes(pattern: str) -> str:
    """Returns a regular expression with a space for each escape and character class."""
    return without_quotes(pattern, _REGEX_OPENING, {"[": _CLASS_END})


_EBNF_OPENING = re.compile(r'["#\[]')
_EBNF_CLOSINGS = {
    '"': re.compile(r'\\.|(?P<end>")|\n'),
    "#": re.compile(r"(?P<end>(?=\n)|\Z)"),
    "[": _CLASS_END,
}


def without_ebnf_quotes(grammar: str) -> str:
    """Returns an EBNF grammar with a space for each string, comment and character class."""
    return without_quotes(grammar, _EBNF_OPENING, _EBNF_CLOSINGS)


_JSON_OPENING = re.compile('"')
_STRING_END = re.compile(r'\\.|(?P<end>")', re.DOTALL)


def without_json_strings(source: str) -> str:
    """Returns JSON with a space for each string."""
    return without_quotes(source, _JSON_OPENING, {'"': _STRING_END})
