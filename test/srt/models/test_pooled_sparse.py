"""Qwen3.8-Flash-Next beyond parity: every cut of a prompt, chunks of every size, stages, and other sizes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.rank_weights import RankWeights, rank_weights
from sglang.srt.plan.stages import stage_model
from sglang.srt.plan.weights import rank_weight_bytes

from .harness import NativePlan, TinyRunner, hf_logits, plan_for, random_tokens, save_tiny

EXACT = {"rtol": 0.0, "atol": 1e-4}
"""Products of several rows are summed in another order than those of one."""
LENGTH = 30
"""Seven blocks of 4 tokens, of which four are selected, and a part of one; three rounds of the convolution's state."""
END = 7


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> NativePlan:
    folder = tmp_path_factory.mktemp("qwen4")
    save_tiny("qwen4_exp", folder)
    return plan_for(folder)


def tokens_with_ends() -> list[int]:
    tokens = random_tokens(LENGTH, seed=1)
    for place in (5, 13, 14, 22):
        tokens[place] = END
    return tokens


def test_every_cut_of_a_prompt_gives_the_same_logits(plan: NativePlan) -> None:
    runner, tokens = TinyRunner(plan), tokens_with_ends()
    whole = runner.extend({1: tokens})[0]
    for cut in range(1, LENGTH):
        parts = [runner.extend({2: tokens[:cut]})[0], runner.extend({2: tokens[cut:]})[0]]
        torch.testing.assert_close(torch.cat(parts), whole, **EXACT)
        runner.end(2)  # the slot's next request must not see this one's state
    one_by_one = [runner.extend({3: tokens[:1]})[0][0], *(runner.decode({3: token})[0] for token in tokens[1:])]
    torch.testing.assert_close(torch.stack(one_by_one), whole, **EXACT)


def test_chunks_of_every_size(plan: NativePlan) -> None:
    runner, tokens = TinyRunner(plan), tokens_with_ends()
    whole = runner.extend({1: tokens})[0]
    for size in range(2, 12):
        parts = [runner.extend({2: tokens[first : first + size]})[0] for first in range(0, LENGTH, size)]
        torch.testing.assert_close(torch.cat(parts), whole, **EXACT)
        runner.end(2)


OTHER_FORMS = {
    "selects_one": {"indexer_budget": 4},
    "selects_all": {"indexer_budget": 256},
    "blocks_of_2": {"indexer_compress_ratio": 2, "indexer_budget": 6},
    "two_tables": {"ple_layer_ids": [1, 2], "split_ngram_parts": 3},
    "no_table": {"ple_layer_ids": []},
    "longer_ngrams": {"ngram_size": 4, "ple_conv_kernel_size": 2, "heads_per_ngram": 2, "ple_embed_dim": 24},
    "silu_gates": {"output_gate_type": None, "hc_count": 2, "eos_token_id": [7, 9]},
    "as_rotary": {"indexer_head_dim": 8},
}


@pytest.mark.parametrize("form", OTHER_FORMS)
def test_other_sizes(form: str, tmp_path: Path) -> None:
    reference = save_tiny("qwen4_exp", tmp_path, **OTHER_FORMS[form])
    tokens = tokens_with_ends() + random_tokens(LENGTH, seed=2)
    got = TinyRunner(plan_for(tmp_path)).extend({1: tokens})[0]
    torch.testing.assert_close(got, hf_logits(reference, tokens), rtol=0.0, atol=1e-3)


@dataclass(frozen=True)
class StagePlan(NativePlan):
    """Of one stage of a pipeline, with these layers."""

    layers: range = range(0)

    @functools.cached_property
    def description(self) -> ModelDescription:
        return stage_model(NativePlan(self.model).description, self.layers)

    @functools.cached_property
    def weights(self) -> RankWeights:
        return rank_weights(NativePlan(self.model).description, self.ranks).select_stage(self.description)


@torch.inference_mode()
def test_stages_cut_at_every_layer(plan: NativePlan) -> None:
    """Ids reach the stage that looks up n-grams, and streams the one behind it."""
    tokens, num_layers = tokens_with_ends(), len(plan.description.layers)
    whole = TinyRunner(plan).extend({1: tokens})[0]
    for cut in range(1, num_layers):
        stages = [
            TinyRunner(StagePlan(plan.model, kv_cache_dtype=plan.kv_cache_dtype, layers=layers))
            for layers in (range(cut), range(cut, num_layers))
        ]
        parts = []
        for first in range(0, LENGTH, 11):
            intermediate = None
            for stage in stages:
                intermediate = stage.model.compute(
                    stage.batch_of_prompts({1: tokens[first : first + 11]}), intermediate
                )
            parts.append(stages[-1].model.logits(intermediate))
        torch.testing.assert_close(torch.cat(parts), whole, **EXACT)
        held = [sum(p.tensor.nbytes for p in stage.model.params.values()) for stage in stages]
        assert held == [
            rank_weight_bytes(StagePlan(plan.model, layers=layers).weights, plan.dtype)
            for layers in (range(cut), range(cut, num_layers))
        ]
