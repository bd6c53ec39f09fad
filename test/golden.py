"""Golden texts: files beside a test with what a run must give, whole."""

from __future__ import annotations

import os
from pathlib import Path


def check(text: str, golden: Path) -> None:
    """Compares a text with its golden file, which UPDATE_GOLDEN=1 in the environment writes anew before."""
    if os.environ.get("UPDATE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")
