"""Attention groups with requests of their own (--attn-dp-size) give the tokens of one process: the schedule of
`test_parallel_schedules`, for every kind of model, with and without graphs, few and many rows of logits."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from sglang.embedded import DEFAULT_MODEL_PATH
from sglang.srt.distributed import parallel_state
from sglang.srt.layers import embedding
from sglang.srt.plan.ranks import ONE_RANK, RankLayout
from srt.models.harness import save_tiny

from .test_parallel_schedules import CHUNK, NEW_TOKENS, Outcome, outcome

DP2, DP4 = RankLayout(2, attn_dp_size=2), RankLayout(4, attn_dp_size=4)
TP4_DP2 = RankLayout(4, attn_dp_size=2)
DP2_HEAD, TP4_DP2_HEAD = RankLayout(2, attn_dp_size=2, dp_lm_head=True), RankLayout(4, attn_dp_size=2, dp_lm_head=True)
DP2_EP2 = RankLayout(2, 2, attn_dp_size=2)
POOL = 80
"""Tokens of a group: too few for two of the requests, so that some go back to the queue."""


@dataclass(frozen=True)
class Case:
    """A tiny model ("": the embedded one), its layout, changes of its config, and flags."""

    tiny: str
    ranks: RankLayout
    changes: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)


LAYOUTS = {
    "DP2": DP2,
    "DP4": DP4,
    "TP4 x DP2": TP4_DP2,
    "DP2, own heads": DP2_HEAD,
    "TP4 x DP2, own heads": TP4_DP2_HEAD,
}
EXPERT_LAYOUTS = {
    "DP2 x EP2": DP2_EP2,
    "TP4 x DP2 x EP2": RankLayout(4, 2, attn_dp_size=2),
    "DP4 x EP4": RankLayout(4, 4, attn_dp_size=4),
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {}),
    "experts": ("qwen3_moe", {}),
    "latents": ("deepseek_v3", {}),
    "selected latents": ("deepseek_v32", {}),
    "blocks": ("minimax_m3", {}),
    "windows": ("qwen3_windows", {}),
    "states": ("qwen3_next", {"tie_word_embeddings": True}),
    "biases": ("gpt_oss", {}),
    "embedded": ("", {}),
}
WITH_EXPERTS = ("experts", "latents", "selected latents", "blocks", "states", "biases")
IN_CI = {("latents", "DP2 x EP2"), ("embedded", "TP4 x DP2")}


def _cases() -> list[Any]:
    cells = [(model, layout) for model in MODELS for layout in LAYOUTS]
    cells += [(model, layout) for model in WITH_EXPERTS for layout in EXPERT_LAYOUTS]
    return [pytest.param(*cell, marks=[] if cell in IN_CI else [pytest.mark.thorough]) for cell in cells]


def _rank(rank: int, ranks: RankLayout, folder: str, out: Path, flags: dict[str, Any]) -> None:
    """Once without graphs, once with; then steps of two rows and more leave the ranks their columns of the logits."""
    torch.set_num_threads(1)
    for i, replayed in enumerate((None, set[int]())):
        embedding.FEWEST_SHARDED_ROWS = 16 if replayed is None else 2
        result = outcome(folder, ranks, rank, f"file://{out}/rendezvous{i}", replayed, **flags)
        (out / f"{i}.{rank}.json").write_text(json.dumps(result.__dict__))
        parallel_state.shutdown()
        assert replayed is None or replayed, "steps had graphs"


def check(tiny: str, ranks: RankLayout, changes: dict[str, Any], tmp_path: Path) -> None:
    folder, groups = str(DEFAULT_MODEL_PATH), ranks.attn_dp_size
    if tiny:
        folder = str(tmp_path / "model")
        save_tiny(tiny, Path(folder), **changes)
    one = outcome(folder, ONE_RANK, 0, None)
    flags = {"max_total_tokens": POOL, "chunked_prefill_size": CHUNK * groups, "max_running_requests": 4 * groups}
    mp.spawn(_rank, (ranks, folder, tmp_path, flags), nprocs=ranks.world_size)
    for i in range(2):
        every = [json.loads((tmp_path / f"{i}.{rank}.json").read_text()) for rank in range(ranks.world_size)]
        for rank, got in enumerate(Outcome(**one_rank) for one_rank in every):
            where = f"rank {rank}, {('no graphs', 'graphs')[i]}"
            assert got == Outcome(**every[0]), where
            assert got.finishes == one.finishes, where
            assert got.num_retracted > 0 or groups > 2, where
            assert got.num_cached > 0, where
            aborted, other = got.tokens["aborted"], one.tokens["aborted"]
            assert aborted and aborted[: len(other)] == other[: len(aborted)] and len(aborted) < NEW_TOKENS, where
            assert {**got.tokens, "aborted": other} == one.tokens, where


@pytest.mark.parametrize(("model", "layout"), _cases())
def test_groups_give_the_tokens_of_one_process(model: str, layout: str, tmp_path: Path) -> None:
    tiny, changes = MODELS[model]
    check(tiny, (LAYOUTS | EXPERT_LAYOUTS)[layout], changes, tmp_path)
