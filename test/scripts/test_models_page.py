from __future__ import annotations

import models_page

from sglang.srt.configs.quantization import READERS, SPELLINGS
from sglang.srt.configs.speculative import ALGORITHMS, NGRAM
from sglang.srt.plan.families import FAMILIES, SERVED_ARCHITECTURES
from sglang.srt.towers.registry import BY_MODEL_TYPE


def test_the_page_is_current() -> None:
    assert models_page.PAGE.read_text(encoding="utf-8") == models_page.page(), "run: python scripts/models_page.py"


def test_the_page_names_everything() -> None:
    text = models_page.page()
    names = (*SERVED_ARCHITECTURES, *READERS, *SPELLINGS, *(name for name in ALGORITHMS if name != NGRAM))
    assert [name for name in names if f"`{name}`" not in text] == []


def test_every_family_has_a_title() -> None:
    assert [family.architectures for family in FAMILIES if not family.title] == []


def test_a_model_reads_what_it_has_an_encoder_for() -> None:
    rows = models_page.rows()
    assert models_page.inputs(rows["Qwen3"]) == "text" and models_page.inputs(rows["Gemma 3"]) == "text"
    assert models_page.inputs(rows["Llama 4"]) == "images" and models_page.inputs(rows["Gemma 4"]) == "images, video"
    described = {kind for families in rows.values() for family in families for kind in family.model_types}
    assert set(BY_MODEL_TYPE) - described == {"glm46v"}  # a name of GLM-4V's families in its own configs


def test_a_draft_of_its_own_is_what_the_family_declares() -> None:
    rows = models_page.rows()
    assert models_page.own_draft(rows["Llama 2 and 3"]) == ""
    assert models_page.own_draft(rows["GLM-4.5 to GLM-4.7"]) == "`NEXTN`: MTP"
    assert "a layer for each draft token" in models_page.own_draft(rows["Inkling"])
    assert models_page.own_draft(rows["DeepSeek V4.1"]) == "`DSPARK`: a block draft"
