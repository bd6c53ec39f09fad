"""What the hooks of mkdocs make of a page's HTML."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
from docs.commands import ROOT

LONG = "a sentence that leaves no room on a phone for any column beside it"


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "scripts/site_hooks.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table(headings: list[str], cells: list[str]) -> str:
    head = "".join(f"<th>{heading}</th>\n" for heading in headings)
    body = "".join(f'<td style="text-align: left;">{cell}</td>\n' for cell in cells)
    return f"<table>\n<thead>\n<tr>\n{head}</tr>\n</thead>\n<tbody>\n<tr>\n{body}</tr>\n</tbody>\n</table>"


def test_the_cells_of_a_wordy_table_name_their_columns(hooks: ModuleType) -> None:
    html = hooks.on_page_content(table(["name", "<em>meaning</em>"], ["a", LONG]))
    assert "<table data-cards>" in html
    assert '<td style="text-align: left;" data-label="name">a</td>' in html
    assert f'data-label="meaning">{LONG}</td>' in html


@pytest.mark.parametrize(("columns", "cell"), [(2, "short"), (5, LONG)])
def test_tables_that_fit_and_matrices_are_as_they_were(hooks: ModuleType, columns: int, cell: str) -> None:
    html = table(["heading"] * columns, [cell] * columns)
    assert hooks.on_page_content(html) == html


def test_flags_in_texts_are_kept_in_one_piece(hooks: ModuleType) -> None:
    html = "<p id='--a'>see --plain <code>x --tp-size 2</code> a--b</p>"
    assert hooks.on_page_content(html) == (
        "<p id='--a'>see <span class=\"flag\">--plain</span>"
        ' <code>x <span class="flag">--tp</span>-size 2</code> a--b</p>'
    )
    command = "<pre><code>serve --tp-size 2</code></pre>"
    assert hooks.on_page_content(command) == ('<pre><code>serve <span class="flag">--tp-size</span> 2</code></pre>')
