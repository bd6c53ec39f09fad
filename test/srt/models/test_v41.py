"""DeepSeek-V4.1 against a reference in plain torch: every cut of a prompt, decoding, levels of the indexer that leave
something out, refusals by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize(
    ("cuts", "sizes", "decoded"),
    [
        ((1, 8, 33), (23,), 4),
        pytest.param(range(1, LENGTH), range(2, 18), LENGTH - 1, marks=pytest.mark.thorough),
    ],
)
def test_every_cut_of_a_prompt_gives_the_same_logits(
    cuts: Sequence[int], sizes: Sequence[int], decoded: int, small: tuple[V41, NativePlan]
) -> None:
    runner, tokens = TinyRunner(small[1]), random_tokens(LENGTH, seed=1)
    whole = runner.extend({1: tokens})[0]
    for cut in cuts:
        parts = [runner.extend({2: tokens[:cut]})[0], runner.extend({2: tokens[cut:]})[0]]
        torch.testing.assert_close(torch.cat(parts), whole, **EXACT)
        runner.end(2)  # the slot's next request must not see this one's tokens
    for size in sizes:
        parts = [runner.extend({2: tokens[first : first + size]})[0] for first in range(0, LENGTH, size)]
        torch.testing.assert_close(torch.cat(parts), whole, **EXACT)
        runner.end(2)
    runner.extend({3: tokens[:-decoded]})
    one_by_one = [runner.decode({3: token})[0] for token in tokens[-decoded:]]
    torch.testing.assert_close(torch.stack(one_by_one), whole[-decoded:], **EXACT)


def test_requests_of_other_lengths_beside_each_other(small: tuple[V41, NativePlan]) -> None:
    reference, plan = small
    runner, prompts = TinyRunner(plan), {slot: random_tokens(9 * slot, seed=slot) for slot in (1, 2, 5)}
    for got, tokens in zip(runner.extend(prompts), prompts.values(), strict=True):
        torch.testing.assert_close(got, reference.logits(tokens), rtol=0.0, atol=1e-3)
    got = runner.decode(dict.fromkeys(prompts, 7))
    want = torch.stack([reference.logits([*tokens, 7])[-1] for tokens in prompts.values()])
    torch.testing.assert_close(got, want, rtol=0.0, atol=1e-3)


def test_pads_do_not_end_ngrams_and_capitals_are_no_other_texts(small: tuple[V41, NativePlan]) -> None:
    """Token 2 pads before a prompt's first token, and inside a prompt it is a token as others."""
    reference, plan = small
    tokens = [2, 2, 9, 2, 201, 9, 2, 2, 255, 63, 17, 209]
    torch.testing.assert_close(TinyRunner(plan).extend({1: tokens})[0], reference.logits(tokens), rtol=0.0, atol=1e-3)


@pytest.mark.parametrize(
    "changes",
    [
        {"index_topk": 64},
        {"candidate_topk_blocks": 1, "candidate_block_size": 16, "index_topk": 3},
        {"candidate_source_layer_id": -1},
        {"candidate_source_layer_id": 6},
        {
            "kv_source_layer_ids": [1, 4, 6],
            "index_source_layer_ids": [1, 2, 3, 4, 6, 7],
            "candidate_source_layer_id": 4,
        },
        {"num_hidden_layers": 2, "engram_layer_ids": [0]},
        {"num_hidden_layers": 4, "compress_ratios": [0, 2, 2, 0], "kv_source_layer_ids": [1], "hc_mult": 2}
        | {"index_source_layer_ids": [1, 2], "engram_layer_ids": []},
        {"engram_max_ngram_size": 2, "engram_layer_ids": [0, 1, 7]},
    ],
)
def test_other_schedules(changes: dict[str, Any], tmp_path: Path) -> None:
    reference = save_v41(tmp_path, **changes)
    tokens = random_tokens(LENGTH, seed=2)
    runner = TinyRunner(plan_for(tmp_path))
    got = torch.cat([runner.extend({1: tokens[:41]})[0], runner.extend({1: tokens[41:]})[0]])
    torch.testing.assert_close(got, reference.logits(tokens), rtol=0.0, atol=1e-3)
