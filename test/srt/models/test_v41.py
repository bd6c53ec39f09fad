"""DeepSeek-V4.1 against a reference in plain torch: every cut of a prompt, decoding, levels of the indexer that leave
something out, refusals by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .harness import NativePlan, TinyRunner, plan_for, random_tokens
from .v41_reference import V41, save_v41

EXACT = {"rtol": 0.0, "atol": 2e-4}
LENGTH = 61
"""61 entries a token, of which the indexers choose 6, the later ones in 3 of 8 runs."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[V41, NativePlan]:
    folder = tmp_path_factory.mktemp("v41")
    return save_v41(folder), plan_for(folder)


def test_logits_are_those_of_the_reference(small: tuple[V41, NativePlan]) -> None:
    reference, plan = small
    tokens = random_tokens(LENGTH, seed=1)
    torch.testing.assert_close(TinyRunner(plan).extend({1: tokens})[0], reference.logits(tokens), rtol=0.0, atol=1e-3)
