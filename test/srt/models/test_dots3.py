"""dots3-note: logits of a plain reference, and of transformers' class, in every kind of step, on ranks and in FP8, its
draft layer, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sglang.srt.blocks.mla.spec import MLA
from sglang.srt.errors import UserError

from .dots3_reference import CONFIG, Dots3, weights
from .draft_harness import DraftRunner, check_proposals, plan_with_draft
from .harness import TinyRunner, plan_for, random_tokens
from .ling3_reference import save
from .ranks_alike import assert_ranks_alike
from .test_ling3 import CLOSE, TOKENS, steps


def test_logits_of_the_reference(tmp_path: Path) -> None:
    tensors = weights(draft=True)
    plan = plan_for(save(tmp_path, CONFIG, tensors))
    assert plan.description.unsupported == ()
    runner, want = TinyRunner(plan), Dots3(tensors, CONFIG).logits(TOKENS)
    assert want.std() > 0.1
    torch.testing.assert_close(steps(runner), want, **CLOSE)
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()
