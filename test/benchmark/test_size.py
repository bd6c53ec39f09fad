"""benchmark/ holds what an owner of a card runs; what made data and decided something is in lab/."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_LINES = 5000


def test_what_owners_run_stays_small() -> None:
    lines = sum(len(path.read_text().splitlines()) for path in (ROOT / "benchmark").rglob("*.py"))
    assert lines <= MAX_LINES, "a study, or what made data, belongs in lab/"


def test_nothing_outside_takes_helpers_from_the_laboratory() -> None:
    paths = [path for folder in ("python", "benchmark", "scripts") for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 500
    assert [
        path for path in paths if re.search(r'sys\.path.*"lab\b|import tiny_model|from tiny_model', path.read_text())
    ] == []
