"""Naive-N0.5: logits of a plain reference in every kind of step and on ranks, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.errors import UserError
from sglang.srt.plan.masks import SelectedTokens, SlidingWindow

from .harness import TinyRunner, plan_for
from .ling3_reference import save
from .naive_n05_reference import CONFIG, NaiveN05, weights
from .ranks_alike import assert_ranks_alike
from .test_ling3 import CLOSE, TOKENS, steps


def test_logits_of_the_reference(tmp_path: Path) -> None:
    tensors = weights()
    plan = plan_for(save(tmp_path, CONFIG, tensors))
    assert plan.description.unsupported == ()
    runner, want = TinyRunner(plan), NaiveN05(tensors, CONFIG).logits(TOKENS)
    assert want.std() > 0.1
    torch.testing.assert_close(steps(runner), want, **CLOSE)
    assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()


def test_the_selection_changes_what_comes_out() -> None:
    """Otherwise the test above would say nothing about it; up to `index_topk` tokens all are seen."""
    tensors, few = weights(), CONFIG["index_topk"]
    chosen, all_seen = (NaiveN05(tensors, CONFIG, selects).logits(TOKENS) for selects in (True, False))
    assert (chosen - all_seen).abs().max() > 0.01
    torch.testing.assert_close(chosen[:few], all_seen[:few])


def test_requests_shorter_than_the_selection_are_dense(tmp_path: Path) -> None:
    runner = TinyRunner(plan_for(save(tmp_path, CONFIG, weights())))
    want = NaiveN05(weights(), CONFIG).logits(TOKENS[:5])
    torch.testing.assert_close(runner.extend({1: TOKENS[:5]})[0], want, **CLOSE)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_ranks_give_the_logits_of_one(size: int, tmp_path: Path) -> None:
    save(tmp_path / "quantized", CONFIG, weights())
    assert_ranks_alike(size, steps, CLOSE, tmp_path)


def test_layers_of_a_config(tmp_path: Path) -> None:
    layers = plan_for(save(tmp_path, CONFIG, {})).description.layers
    mixers = [layer.mixer for layer in layers if isinstance(layer.mixer, GQA)]
    kinds = [SelectedTokens, SlidingWindow, SelectedTokens, SelectedTokens]
    assert [type(mixer.mask) for mixer in mixers] == kinds
    assert [mixer.softmax.sinks for mixer in mixers] == [False, True, False, False]
    assert mixers[0].top_k == 6 and mixers[0].selected_slots(2) == 6 and mixers[0].token_scores(100, 2) == 100


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"add_full_attention_sink_bias": True}, "sinks in layers that attend to selected tokens are not supported"),
        ({"index_head_dim": 4}, "'index_head_dim' 4 is less than the 8 rotary dims"),
        ({"indexer_rope_interleave": True}, "indexer_rope_interleave = True is not supported"),
        ({"attention_projection_layout": "other"}, "attention_projection_layout = 'other' is not supported"),
    ],
)
def test_other_forms_are_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        _ = plan_for(save(tmp_path, CONFIG | keys, {})).description
