from __future__ import annotations

import flags_page

from sglang.srt.server_args import TABLE


def test_the_page_is_current() -> None:
    assert flags_page.PAGE.read_text(encoding="utf-8") == flags_page.page(), "run: python scripts/flags_page.py"


def test_the_page_names_everything() -> None:
    text = flags_page.page()
    missing = [name for name in TABLE.meanings if f"`{name}`" not in text]
    assert not missing
