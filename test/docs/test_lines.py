"""Lines of prose in the pages: at most 120 characters, or one sentence. Tables, headings and commands may be longer."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

import pytest

from docs.commands import ROOT

LENGTH = 120
LISTED = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "*.md"], cwd=ROOT, capture_output=True)
PAGES = sorted(path for path in LISTED.stdout.decode().splitlines() if (ROOT / path).exists())
SENTENCE_ENDS = re.compile(r"[.!?:][\"')\]*`]*\s+(?=[\"'(\[*`]*[A-Z])")


def prose(text: str) -> Iterator[str]:
    fenced = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith(("    ", "|", "#", "![")):
            yield line


def too_long(page: str) -> list[str]:
    lines = prose((ROOT / page).read_text())
    return [line for line in lines if len(line) > LENGTH and SENTENCE_ENDS.search(line)]


@pytest.mark.parametrize("page", PAGES)
def test_lines_are_short_or_one_sentence(page: str) -> None:
    assert too_long(page) == []


def test_a_long_line_is_seen() -> None:
    long = "word " * 24
    assert not SENTENCE_ENDS.search(long) and SENTENCE_ENDS.search(f"{long}. Another sentence.")
    assert list(prose("a\n| table |\n# heading\n    code\n```sh\nfenced\n```\n- item")) == ["a", "- item"]
