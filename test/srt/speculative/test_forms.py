"""Every form of draft names a class that computes it and one that proposes tokens with it."""

from __future__ import annotations

from pkgutil import resolve_name

import pytest

from sglang.srt.configs.speculative import ALGORITHMS, NGRAM
from sglang.srt.drafts.config import MTP
from sglang.srt.drafts.form import Form
from sglang.srt.drafts.kv_sharing.spec import KV_SHARING
from sglang.srt.drafts.registry import READERS

FORMS = {form.__name__: form for form in Form.__subclasses__()}  # dataclasses with slots are there twice


@pytest.mark.parametrize("name", FORMS)
def test_its_classes_are_there(name: str) -> None:
    form = FORMS[name]
    folder = form.__module__.removesuffix("spec")
    assert form.computed_by.startswith(folder), "in the folder of its description"
    model, drafter = resolve_name(form.computed_by), resolve_name(form.proposed_by)
    assert hasattr(model, "loadables") and hasattr(model, "features")
    assert hasattr(drafter, "propose") and hasattr(drafter, "begin")


def test_every_algorithm_has_a_reader() -> None:
    assert {*READERS, NGRAM} == {*ALGORITHMS, MTP, KV_SHARING}
    assert len(FORMS) == 8
