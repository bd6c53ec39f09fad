from __future__ import annotations

import re
from pathlib import Path

import comparison_page
import pytest
from comparison_page import FEATURES, PAGE, not_served

from sglang.srt.server_args import TABLE
from sglang.srt.upstream_interface import ACCEPTED, REFUSED

ROWS = [feature for rows in FEATURES.values() for feature in rows]
DOCS = PAGE.parent


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == comparison_page.page(), "run: python scripts/comparison_page.py"


def test_a_feature_is_here_where_its_name_is_served() -> None:
    for feature in ROWS:
        reason = not_served(feature.name)
        served = feature.name in TABLE.names
        refused = any(feature.name[2:] == name.partition("=")[0] for group in REFUSED for name in group.names)
        assert reason.startswith("no: ") if refused else reason.startswith(("not needed: ", "no: ")) or not reason, (
            feature
        )
        assert not (served and refused), feature


def headings(page: Path) -> set[str]:
    """Returns the anchors of a page's headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("feature", ROWS, ids=lambda feature: feature.title)
def test_the_evidence_of_a_feature_is_a_page_or_a_test(feature: comparison_page.Feature) -> None:
    if not_served(feature.name):
        assert not feature.evidence, "evidence of a feature that is not here"
    elif feature.evidence.startswith("test/"):
        assert (DOCS.parent / feature.evidence).is_file()
    else:
        page, _, anchor = feature.evidence.partition("#")
        assert page.endswith(".md") and (not anchor or anchor in headings(DOCS / page))


def test_no_flag_is_evidence() -> None:
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 6 and cells[2].startswith("yes"):
            assert re.fullmatch(r"yes: \[[^\]]+\]\([^)]+\)", cells[2]), line


def test_a_name_that_no_table_knows_is_an_error() -> None:
    for name in ("--no-such-flag", "/no/such/route", "sglang nothing", "python -m sglang.nothing"):
        with pytest.raises(ValueError, match="correct the row"):
            not_served(name)


def test_accepted_and_refused_flags_say_why() -> None:
    assert not_served(f"--{ACCEPTED[0].names[0].partition('=')[0]}").startswith("not needed: ")
    assert not_served(f"--{REFUSED[0].names[0].partition('=')[0]}").startswith("no: ")
