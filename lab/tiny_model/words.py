"""The material of problems: words, ways to ask, small talk and facts, read from the text files beside this one."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def sections(name: str) -> dict[str, list[str]]:
    """[title] lines and the lines below each, of a text file."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in (HERE / name).read_text(encoding="utf-8").splitlines():
        if line.startswith("[") and line.endswith("]"):
            lines = found.setdefault(line[1:-1], [])
        elif line and not line.startswith("#"):
            lines.append(line.replace("\\n", "\n"))
    return found


_LISTS = {title: " ".join(lines).split() for title, lines in sections("words.txt").items()}

NAMES = _LISTS["names"]
CITIES = _LISTS["cities"]
NOUNS = _LISTS["nouns"]
WORDS = NOUNS + _LISTS["adjectives"]
"""The words that are copied, sorted, reversed and looked up."""

ITEMS = _LISTS["items"]
JOBS = _LISTS["jobs"]
COLORS = _LISTS["colors"]
DAYS = _LISTS["days"]
MONTHS = _LISTS["months"]
GOODS = _LISTS["goods"]
EVENTS = _LISTS["events"]
SKIES = _LISTS["skies"]

PHRASES = sections("phrases.txt")
"""Ways to ask, with {placeholders}."""

TALK = sections("talk.txt")
"""Answer -> ways to get it."""


def some_time(rng: random.Random) -> str:
    return f"{rng.randrange(24):02}:{rng.randrange(0, 60, 5):02}"


@cache
def facts() -> dict[str, dict[str, Any]]:
    """Table name -> `ask` (phrasings with {x}), `answer` (with {x} and {y}), `pairs` (x -> y)."""
    tables: dict[str, dict[str, Any]] = json.loads((HERE / "facts.json").read_text(encoding="utf-8"))
    return tables
