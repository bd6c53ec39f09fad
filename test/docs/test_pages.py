"""The README and the pages of figures and routes: size, picture, links, measurements, missing features."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from starlette.routing import Route

from docs.commands import PAGES, ROOT
from sglang.srt.entrypoints.http_app import FORMS
from sglang.srt.plan.families import FAMILIES
from sglang.srt.upstream_interface import REFUSED

README = (ROOT / "README.md").read_text()
PERFORMANCE = (ROOT / "docs" / "performance.md").read_text()
RESULTS = sorted((ROOT / "benchmark" / "results").glob("*.md"))
MEASURED = "\n".join(path.read_text() for path in RESULTS)
NOT_YET = {
    "Drafts of the kind UNO": "Other drafts",
    "prefill and decode on different servers": "Prefill and decode apart",
    "TLS": "TLS",
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_headings_of_results(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    links = [(page.parent / target, anchor) for target, anchor in re.findall(r"\]\(([^)\s#]*)#([^)\s]+)\)", prose)]
    links = [(page if target.is_dir() else target.resolve(), anchor) for target, anchor in links]
    wrong = [(target.name, anchor) for target, anchor in links if target in RESULTS and anchor not in anchors(target)]
    assert wrong == []


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_results_are_pages_by_subject() -> None:
    index, *pages = RESULTS
    listed = re.findall(r"^\| \[[^]]*\]\(([^)]*)\)", index.read_text(), re.MULTILINE)
    assert len(pages) == 8 and sorted(listed) == [page.name for page in pages]
    for page in RESULTS:
        assert page.read_text().split("\n\n")[1].startswith(("For those who", "For owners of")), page


def tables(text: str) -> list[list[list[str]]]:
    """Returns the rows of every table, titles first, without the line of dashes."""
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    parted = [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()] for block in blocks
    ]
    return [[titles, *rest] for titles, _, *rest in parted]


def comparisons(text: str, other: str = "") -> list[tuple[str, str, str]]:
    """Returns this server's figure, another's and the ratio of each row whose table has columns with these.

    other: how the title of the other's column begins.
    """
    rows = []
    for titles, *table in tables(text):
        columns = [i for i, title in enumerate(titles) if title.startswith("ratio") and titles[i - 1].startswith(other)]
        rows += [(row[i - 2], row[i - 1], row[i]) for i in columns for row in table if row[i]]
    return rows


def test_the_readme_has_eight_rows_of_families() -> None:
    (table,) = [rows for titles, *rows in tables(README) if titles == ["family", "models"]]
    words = set(re.findall(r"[A-Za-z]+", " ".join(map(" ".join, table))))
    assert len(table) == 8
    makers = {re.match("[A-Za-z]+", family.title) for family in FAMILIES}
    assert sorted(maker[0] for maker in makers if maker and maker[0] not in words) == []


def test_figures_of_the_readme_are_those_that_were_measured() -> None:
    (table,) = [rows for titles, *rows in tables(README) if "other server" in titles]
    assert len(table) == 14
    for model, _, requests, other, *figures in table:
        row = f"| {' | '.join(figures)} |"
        if other == "vLLM":
            row = f"| {requests} {row}"
        start = f"| {model}" if other == "vLLM" else "| "
        for page in (MEASURED, PERFORMANCE):
            assert any(line.startswith(start) and row in line for line in page.splitlines()), (model, requests, row)


def test_measured_rows_of_the_page_are_on_the_pages_of_results() -> None:
    known = comparisons(PERFORMANCE)
    assert len(known) > 150
    assert [row for row in known if row not in comparisons(MEASURED)] == []


@pytest.mark.parametrize("page", [*RESULTS, ROOT / "docs" / "performance.md"], ids=lambda page: page.name)
def test_ratios_are_those_of_their_figures(page: Path) -> None:
    for ours, other, ratio in comparisons(page.read_text()):
        try:
            a, b, known = (float(cell.replace(",", "")) for cell in (ours, other, ratio))
        except ValueError:
            continue  # not two figures of one measurement
        assert any(abs(known / quotient - 1) < 0.045 for quotient in (a / b, b / a)), (ours, other, ratio)


def test_where_sglang_is_faster_is_said_in_one_table() -> None:
    before, _, behind = PERFORMANCE.partition("## Where we are slower")
    listed = comparisons(behind.partition("\n## ")[0])
    assert len(listed) > 20 and all(float(ratio) < 1 for *_, ratio in listed)
    slower = [row for row in comparisons(f"{before}\n{MEASURED}", "SGLang") if float(row[2]) < 1]
    assert [row for row in slower if row not in listed] == []


def test_predicted_rows_of_the_page_are_on_the_page_of_the_card() -> None:
    """There a cell is `predicted (range) / best measured / floor`."""
    (table,) = [t for t in tables(PERFORMANCE) if t[0] == ["model", "cards", "step", "predicted", "range", "floor"]]
    card, names = (ROOT / "benchmark" / "results" / "card.md").read_text().splitlines(), ("", "")
    assert len(table) == 25
    for model, cards, step, predicted, bounds, floor in table[1:]:
        names = (model, cards) if model else names
        (line,) = [
            line for line in card if line.startswith(f"| {names[0]} | {names[1]} | ") and "(" in line.split("|")[3]
        ]
        cell = rf"{re.escape(predicted)} \({bounds.replace(' to ', '-')}\) / [\d.]+ / {re.escape(floor)} \|"
        assert re.search(cell, line), (names, step)


def test_routes_of_the_page_are_served() -> None:
    table = (ROOT / "docs" / "api.md").read_text().partition("## Routes")[2].partition("```")[0]
    named = re.findall(r"`(/[^`]*)`", table)
    served = {route.path for form in FORMS for route in form.router.routes if isinstance(route, Route)}
    assert len(named) > 30 and sorted(set(named) - served) == []
