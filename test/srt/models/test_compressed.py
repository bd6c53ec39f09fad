"""DeepSeek-V4 beyond parity: every cut of a prompt, and a choice of entries that leaves none out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .harness import NativePlan, TinyRunner, hf_logits, plan_for, random_tokens, save_tiny

EXACT = {"rtol": 0.0, "atol": 1e-4}
"""Products of several rows are summed in another order than those of one."""
LENGTH = 37
"""Two whole runs of 16 tokens and a part of one, nine runs of 4 and a part."""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> NativePlan:
    folder = tmp_path_factory.mktemp("v4")
    save_tiny("deepseek_v4", folder)
    return plan_for(folder)


def test_every_cut_of_a_prompt_gives_the_same_logits(plan: NativePlan) -> None:
    runner, tokens = TinyRunner(plan), random_tokens(LENGTH, seed=1)
    whole = runner.extend({1: tokens})[0]
    for cut in range(1, LENGTH):
        parts = [runner.extend({2: tokens[:cut]})[0], runner.extend({2: tokens[cut:]})[0]]
        torch.testing.assert_close(torch.cat(parts), whole, **EXACT)
        runner.end(2)  # the slot's next request must not see this one's pending tokens
    one_by_one = [runner.extend({3: tokens[:1]})[0][0], *(runner.decode({3: token})[0] for token in tokens[1:])]
    torch.testing.assert_close(torch.stack(one_by_one), whole, **EXACT)


def test_chunks_of_every_size(plan: NativePlan) -> None:
    runner, tokens = TinyRunner(plan), random_tokens(LENGTH, seed=1)
    whole = runner.extend({1: tokens})[0]
    for size in range(2, 18):
        parts = [runner.extend({2: tokens[first : first + size]})[0] for first in range(0, LENGTH, size)]
        torch.testing.assert_close(torch.cat(parts), whole, **EXACT)
        runner.end(2)


@pytest.mark.parametrize("top_k", [1, 64])
def test_other_numbers_of_chosen_entries(top_k: int, tmp_path: Path) -> None:
    reference = save_tiny("deepseek_v4", tmp_path, index_topk=top_k, hc_sinkhorn_iters=20)
    tokens = random_tokens(70, seed=2)
    got = TinyRunner(plan_for(tmp_path)).extend({1: tokens})[0]
    torch.testing.assert_close(got, hf_logits(reference, tokens), rtol=0.0, atol=1e-3)


def test_layers_as_pro_has_them(tmp_path: Path) -> None:
    """No layer without compression, and other numbers of streams' rounds."""
    changes = {"compress_ratios": [128, 128, 4], "num_hidden_layers": 3, "hc_sinkhorn_iters": 1, "hc_mult": 2}
    reference = save_tiny("deepseek_v4", tmp_path, **changes)
    tokens = random_tokens(50, seed=3)
    got = TinyRunner(plan_for(tmp_path)).extend({1: tokens})[0]
    torch.testing.assert_close(got, hf_logits(reference, tokens), rtol=0.0, atol=1e-3)
