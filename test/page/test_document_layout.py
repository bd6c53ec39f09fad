"""The pages of the documents at the widths of a laptop and of a phone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from docs.commands import ROOT
from docs.test_site import build

pytestmark = pytest.mark.browser

OVERFLOW = """() => {
  const inside = (element) => {
    for (let e = element; e && e !== document.body; e = e.parentElement) {
      if (getComputedStyle(e).overflowX !== "visible") return true;
    }
    return false;
  };
  return [...document.querySelectorAll(".md-content *")]
    .filter((e) => e.getBoundingClientRect().right > innerWidth + 1 && !inside(e))
    .map((e) => e.textContent.trim().slice(0, 60));
}"""
"""Texts that stick out at the right, except within what scrolls."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_sticks_out(site: Path, chromium: Any, width: int) -> None:
    page = chromium.new_page(viewport={"width": width, "height": 900})
    wide: dict[str, Any] = {}
    for path in sorted(site.glob("*.html")):
        page.goto(path.as_uri())
        if texts := page.evaluate(OVERFLOW):
            wide[path.stem] = texts[:3]
        diagrams = page.locator(".diagram pre > code").all()
        if width == 1280 and any(code.evaluate("e => e.scrollWidth > e.clientWidth + 1") for code in diagrams):
            wide[path.stem] = "a diagram scrolls"
        cards = page.locator("table[data-cards]").all()
        if width == 390 and any(table.evaluate("e => e.scrollWidth > innerWidth") for table in cards):
            wide[path.stem] = "a table of cards scrolls"
    page.close()
    assert wide == {}
