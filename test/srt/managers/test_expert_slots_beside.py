"""Experts in main memory beside what else uses it: sleep, cached prefixes there, and drafts. Tokens are those of the
resident model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pairs import some

from ..models.harness import save_tiny
from .test_memory_control import Rank, prompt

SLOTS = {"enable_paged_experts": True, "paged_experts_num_resident": 3}
TIER = {"enable_hierarchical_cache": True, "hicache_size": 1, "hicache_write_policy": "write_through"}
DRAFTS = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}
BESIDE: dict[str, dict[str, Any]] = {"sleep": {}, "prefixes": TIER, "drafts": DRAFTS, "all": {**TIER, **DRAFTS}}


@pytest.mark.parametrize("beside", some(list(BESIDE), {"all"}))
@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.thorough)])
def test_tokens_are_those_of_resident_experts(name: str, beside: str, tmp_path: Path) -> None:
    """Twice, for what is cached, and after each of two sleeps; prompts share a beginning."""
    save_tiny(name, tmp_path)
    prompts = [prompt(0, 24)[: 8 + 4 * number] + prompt(number, 6) for number in range(4)]
    resident, rank = Rank(tmp_path, **BESIDE[beside]), Rank(tmp_path, **SLOTS, **BESIDE[beside])
    want = [resident.tokens(ids) for ids in prompts]
    assert rank.runner.plan.expert_slots is not None and resident.runner.plan.expert_slots is None
    for sleeps in range(3):
        if sleeps and beside != "drafts":
            assert rank.memory.sleep([], keep_weights=True) == ""
            assert rank.memory.wake([]) == ""
        for _ in range(2):
            assert [rank.tokens(ids) for ids in prompts] == want
    buffers = rank.runner.model.expert_buffers
    assert buffers is not None and (totals := buffers.totals()) is not None and totals[1] > 0


def test_a_server_that_cannot_get_its_experts_back_does_not_lose_them(tmp_path: Path) -> None:
    save_tiny("qwen3_moe", tmp_path)
    rank = Rank(tmp_path, **SLOTS)
    want = rank.tokens(prompt(1))
    assert rank.memory.sleep([], keep_weights=False) != ""
    assert rank.memory.state.serves and rank.tokens(prompt(1)) == want
