"""Facts of classes are found in the process of the tests: one for each tiny config would take seconds."""

from __future__ import annotations

import pytest

from sglang.srt.models.transformers_backend import trial
from sglang.srt.plan import served_model


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test may replace it by a function of its own."""
    monkeypatch.setattr(served_model, "facts_of", trial.facts_of)
