"""The README and the pages of figures and routes: size, picture, links, dated measurements, missing features."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from starlette.routing import Route

from docs.commands import PAGES, ROOT
from sglang.srt.entrypoints.http_app import FORMS
from sglang.srt.upstream_interface import REFUSED

README = (ROOT / "README.md").read_text()
PERFORMANCE = (ROOT / "docs" / "performance.md").read_text()
MEASURED = "\n".join(path.read_text() for path in sorted((ROOT / "benchmark" / "results").glob("2*.md")))
NOT_YET = {
    "drafts of the kind UNO": "Other drafts",
    "LoRA": "LoRA",
    "a prefix cache in files": "Cache in files or elsewhere",
    "prefill and decode on different servers": "Prefill and decode apart",
}
"""Words of the README -> the group of refused flags that is there as long as the feature is not."""


def test_the_readme_is_short_and_its_picture_small() -> None:
    assert len(README.splitlines()) <= 120
    (picture,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README)
    assert 0 < (ROOT / picture).stat().st_size < 200_000


def test_the_readme_misses_what_is_refused_and_nothing_else() -> None:
    missing = README.partition("## What is not there yet")[2].partition("\n## ")[0].replace("\n", " ")
    groups = {group.title for group in REFUSED}
    for words, title in NOT_YET.items():
        assert (words in missing) == (title in groups), f"README: {words}; flags that are refused: {title}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = {target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in target}
    assert [target for target in sorted(targets) if target and not (page.parent / target).exists()] == []


def rows(text: str, columns: int) -> list[list[str]]:
    """The rows of every table with that many columns, without titles."""
    cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|")
    return [row for row in cells if len(row) == columns and not row[0].startswith(("---", "model"))]


def test_figures_of_the_readme_are_those_that_were_measured() -> None:
    table = rows(README, 9)
    assert len(table) == 8
    for model, gpus, requests, ours, upstream, ratio, *_ in table:
        figures = f"{ours}, {upstream}, {ratio}" if gpus == "1" else f"| {ours} | {upstream} | {ratio} |"
        assert figures in MEASURED and figures in PERFORMANCE, (model, gpus, requests)


@pytest.mark.parametrize("where", ["MEASURED", "PERFORMANCE"])
def test_figures_beside_vllm_are_those_that_were_measured(where: str) -> None:
    """There a cell has the figures of 1, 16, 64 and 256 requests at once."""
    measured = {model: cells for model, *cells in rows(globals()[where], 4) if cells[0].count("/") == 3}
    table = [row for row in rows(README, 9) if row[6]]
    assert len(table) == 6
    for model, _, requests, *_, ours, vllm, ratio in table:
        name = next(name for name in measured if name.startswith(model))
        number = {"64": 2, "256": 3}[requests]
        assert [ours, vllm, ratio] == [cell.split(" / ")[number] for cell in measured[name]], (model, requests)


def test_measured_cells_of_the_page_are_in_the_dated_files() -> None:
    text = PERFORMANCE.partition("## Predictions")[0]
    cells = re.findall(r"(?<=\| )[\d.,]+, [\d.,]+, [\d.]+(?= \|)", text)
    assert len(cells) > 40
    assert [cell for cell in cells if cell not in MEASURED] == []


def test_predicted_cells_of_the_page_are_in_the_dated_file() -> None:
    """There a cell is `predicted (range) / best measured / floor`."""
    table = rows(PERFORMANCE.partition("## Predictions")[2], 6)
    assert len(table) == 6
    dated = (ROOT / "benchmark" / "results" / "2026-11-22-card-models.md").read_text()
    for model, _, *cells in table:
        for predicted, floor in (cell.split("; ") for cell in cells):
            assert re.search(rf"{re.escape(predicted)} / [\d.]+ / {re.escape(floor)} \|", dated), (model, predicted)


def test_routes_of_the_page_are_served() -> None:
    table = (ROOT / "docs" / "api.md").read_text().partition("## Routes")[2].partition("```")[0]
    named = re.findall(r"`(/[^`]*)`", table)
    served = {route.path for form in FORMS for route in form.router.routes if isinstance(route, Route)}
    assert len(named) > 30 and sorted(set(named) - served) == []
