from __future__ import annotations

import transformers_page


def test_the_page_is_current() -> None:
    text = transformers_page.PAGE.read_text(encoding="utf-8")
    assert text == transformers_page.page(), "run: python scripts/transformers_page.py"


def test_a_reason_is_said_once_for_all_classes() -> None:
    rows = [line for line in transformers_page.page().splitlines() if "its attention is not causal" in line]
    assert len(rows) == 1 and "`RobertaForCausalLM`" in rows[0] and "`BertLMHeadModel`" in rows[0]
