"""Prints which tests run for which family that sees, and with which kinds of drafts: a row a test, a column a family.

    python scripts/media_matrix.py

`x`: in every run of the tests; `t`: in `make thorough`. Read from pytest's collection, so that nothing is listed that
does not run.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = [
    "test/srt/models/test_towers.py",
    "test/srt/models/test_media.py",
    "test/srt/models/test_media_drafts.py",
    "test/media/test_families.py",
]
EVERYTHING = "thorough or not thorough"
Cells = dict[str, dict[str, str]]


def families() -> list[str]:
    sys.path[:0] = [str(ROOT / "python"), str(ROOT / "test")]
    from srt.models.media_harness import SEEING

    return list(SEEING)


def collected(marks: str) -> set[str]:
    """The ids of the tests."""
    words = [sys.executable, "-m", "pytest", "--collect-only", "-m", marks, *FILES]
    printed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {line for line in printed.splitlines() if "::" in line}


def cells(at_once: set[str], ever: set[str], names: list[str]) -> Cells:
    """By row and family. A row is a test, with what else it is parametrized by."""
    table: Cells = defaultdict(dict)
    longest_first = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    for test in sorted(ever):
        function, _, arguments = test.partition("::")[2].partition("[")
        words = arguments.removesuffix("]")
        found = re.search(rf"(?:^|-)({longest_first})(?=$|-| )", words)
        if found:
            beside = (words[: found.start()] + words[found.end() :]).strip("- ")
            row = f"{function}, {beside}" if beside else function
            table[row][found[1]] = "x" if test in at_once else "t"
    return table


def main() -> None:
    names = families()
    table = cells(collected("not thorough"), collected(EVERYTHING), names)
    print("| |", " | ".join(names), "|\n|" + "---|" * (len(names) + 1))
    for row, of_family in table.items():
        print(
            "|", row.removeprefix("test_").replace("_", " "), "|", " | ".join(of_family.get(n, "") for n in names), "|"
        )


if __name__ == "__main__":
    main()
