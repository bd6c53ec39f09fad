from __future__ import annotations

import comparison_page
import pytest
from comparison_page import FEATURES

from sglang.srt.server_args import TABLE
from sglang.srt.upstream_interface import ACCEPTED, REFUSED


def test_the_page_is_current() -> None:
    assert comparison_page.PAGE.read_text(encoding="utf-8") == comparison_page.page(), (
        "run: python scripts/comparison_page.py"
    )


def test_a_feature_is_here_where_its_name_is_served() -> None:
    for feature in (feature for rows in FEATURES.values() for feature in rows):
        state = comparison_page.here(feature.name)
        served = feature.name in TABLE.names or not feature.name.startswith("--")
        refused = any(feature.name[2:] == name.partition("=")[0] for group in REFUSED for name in group.names)
        assert state.startswith("no: ") if refused else state.startswith(("yes, ", "not needed: ", "no: ")), feature
        assert not (served and refused), feature


def test_a_name_that_no_table_knows_is_an_error() -> None:
    for name in ("--no-such-flag", "/no/such/route", "sglang nothing", "python -m sglang.nothing"):
        with pytest.raises(ValueError, match="correct the row"):
            comparison_page.here(name)


def test_accepted_and_refused_flags_say_why() -> None:
    assert comparison_page.here(f"--{ACCEPTED[0].names[0].partition('=')[0]}").startswith("not needed: ")
    assert comparison_page.here(f"--{REFUSED[0].names[0].partition('=')[0]}").startswith("no: ")
