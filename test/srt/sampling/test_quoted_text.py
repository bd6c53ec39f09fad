"""What is quoted in grammars is found in one pass, as simple regular expressions would find it."""

from __future__ import annotations

import random
import re
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from sglang.srt.sampling import quoted_text
from sglang.srt.sampling.quoted_text import (
    without_classes,
    without_ebnf_quotes,
    without_json_strings,
    without_quotes,
)

CASES: list[tuple[Callable[[str], str], str, str]] = [
    (without_classes, r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "[]^\\(a\n"),
    (without_json_strings, r'"(?:[^"\\]|\\.)*"', '"\\[{a\n'),
    (without_ebnf_quotes, r'"(?:[^"\\\n]|\\[^\n])*"|#[^\n]*|\[(?:[^\]\\]|\\.)*\]', '"\\#a\n[]'),
]
LONG = 100_000
HOSTILE = ['"' * LONG, "[" * LONG, '"' + '\\"' * LONG, "[" + "\\]" * LONG, "\\" * LONG, '["' * LONG, "#" * LONG]


@pytest.mark.parametrize(("blank", "pattern", "letters"), CASES)
def test_random_texts(blank: Callable[[str], str], pattern: str, letters: str) -> None:
    """With and without ends of the quotes. `[]` without another end is a quote or none, which makes no difference."""
    rng = random.Random(pattern)
    for length in range(1, 4000):
        text = "".join(rng.choices(letters, k=length % 24))
        expected = re.sub(pattern, " ", text, flags=re.DOTALL)
        assert re.sub(r"[][^]| ", "", blank(text)) == re.sub(r"[][^]| ", "", expected), repr(text)


class Counting:
    """A pattern that counts the characters that it looks at."""

    num_seen = 0

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern

    def search(self, text: str, start: int) -> re.Match[str] | None:
        match = self._pattern.search(text, start)
        Counting.num_seen += (len(text) if match is None else match.end()) - start
        return match


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: f"{text[:3]}...")
@pytest.mark.parametrize(
    ("opening", "closings"),
    [
        (quoted_text._REGEX_OPENING, {"[": quoted_text._CLASS_END}),
        (quoted_text._EBNF_OPENING, quoted_text._EBNF_CLOSINGS),
        (quoted_text._JSON_OPENING, {'"': quoted_text._STRING_END}),
    ],
    ids=["regex", "ebnf", "json"],
)
def test_a_text_is_looked_at_once(text: str, opening: Any, closings: Any) -> None:
    Counting.num_seen = 0
    without_quotes(text, opening, {kind: Counting(pattern) for kind, pattern in closings.items()})  # type: ignore[misc]
    assert Counting.num_seen <= 2 * len(text)


@pytest.mark.parametrize("content", ["a" * LONG, "\\n" * LONG], ids=["letters", "escapes"])
def test_a_long_quote_takes_no_more_memory_than_its_text(content: str) -> None:
    text = f'"{content}"'
    tracemalloc.start()
    try:
        assert without_json_strings(text) == " "
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < len(text)
