from __future__ import annotations

import fields_page
import pytest
from fields_page import Form


def test_the_page_is_current() -> None:
    assert fields_page.PAGE.read_text(encoding="utf-8") == fields_page.page(), "run: python scripts/fields_page.py"


@pytest.mark.parametrize("form", fields_page.forms(), ids=lambda form: form.route)
def test_a_field_has_one_verdict(form: Form) -> None:
    names = [name for row in (*form.nothing, *form.refused) for name in row.names]
    assert len(set(names)) == len(names)
    assert not set(names) & set(form.body.unsupported), "the server's own table has these"
    assert not set(form.done) & set(names) and all(row.reason for row in (*form.nothing, *form.refused))
