"""Experts in main memory on several ranks: the schedule of `test_parallel_schedules` gives the tokens of resident
experts, in every layout, with as few slots as a token needs and with all but one, and with draft tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import FEATURES, LAYOUTS, cells, kinds
from rank_processes import run_ranks

from sglang.srt.distributed import parallel_state
from sglang.srt.layers import embedding
from sglang.srt.layers.moe.expert_slots import ExpertSlots
from sglang.srt.plan.ranks import RankLayout

from ..models.harness import plan_for
from .test_attention_groups import pool_of, save_models
from .test_parallel_schedules import outcome

FEATURE = "experts in main memory"
MODES: dict[str, dict[str, Any]] = {
    "resident": {},
    "few": {**FEATURES[FEATURE].flags, "paged_experts_num_resident": 0},
    "most": FEATURES[FEATURE].flags,
    "drafts": FEATURES[FEATURE].flags,
}
MANY_EXPERTS = ("two head counts", "chunks", "latents", "shared selection", "Kimi delta", "Mamba-2")
"""Kinds of which half of the experts are more than a token chooses."""
CELLS = [
    *cells(kinds("experts", lacking="repeats, cut heads, streams"), ("TP2", "PP2", "DP2"), FEATURE),
    *cells(MANY_EXPERTS, ("EP2",), FEATURE),
    *cells(kinds("plain, experts"), ("TP3", "TP2 x PP2", "DP2 x PP2"), FEATURE),
]


def _rank(rank: int, ranks: RankLayout, folders: dict[str, str], out: Path) -> None:
    torch.set_num_threads(1)
    embedding.MIN_SHARDED_ROWS = 2
    groups, of_step, steps = ranks.attn_dp_size, ExpertSlots.of_step, list[bool]()

    def watched(slots: ExpertSlots, ids: torch.Tensor) -> Any:
        steps.append(ids.numel() <= slots.num_slots)
        return of_step(slots, ids)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(ExpertSlots, "of_step", watched)
        for name, folder in folders.items():
            experts = plan_for(Path(folder)).description.experts
            assert experts is not None
            tokens: dict[str, list[int]] = {}
            for mode, flags in MODES.items():
                steps.clear()
                if mode == "few":
                    fewest = experts.top_k + (experts.fused_shared and ranks.ep_size == 1)
                    flags = {**flags, "paged_experts_num_resident": fewest}
                more: dict[str, Any] = {
                    "max_running_requests": 4 * groups,
                    "chunked_prefill_size": 16 * groups,
                    **flags,
                }
                if groups > 1:
                    more["max_total_tokens"] = pool_of(name)
                # A group of attention has other requests than the next, and draft tokens are those of all.
                known = tokens if mode == "drafts" and groups == 1 else None
                result = outcome(folder, ranks, rank, f"file://{out}/rendezvous.{name}.{mode}", None, known, **more)
                tokens = tokens or result.tokens
                seen = sorted({*steps})
                (out / f"{name}.{mode}.{rank}.json").write_text(json.dumps([result.tokens, result.finishes, seen]))
                parallel_state.shutdown()


def check(ranks: RankLayout, name: str, folder: Path) -> None:
    folders = save_models((name,), ranks, folder)
    run_ranks(_rank, (ranks, folders, folder), ranks.world_size)
    for rank in range(ranks.world_size):
        files = {mode: folder / f"{name}.{mode}.{rank}.json" for mode in MODES}
        runs = [json.loads(file.read_text()) for file in files.values()]
        (*want, none), (_, _, some), (_, _, others), _ = runs
        for tokens, finishes, _ in runs:
            common = min(len(tokens["aborted"]), len(want[0]["aborted"]))  # with draft tokens it has come further
            assert tokens["aborted"][:common] == want[0]["aborted"][:common]
            assert (tokens | {"aborted": []}, finishes) == (want[0] | {"aborted": []}, want[1]), f"rank {rank}"
        assert none == [] and False in some, "steps with buffers"
        # With attention groups every step has the tokens of all of them.
        assert ranks.attn_dp_size > 1 or True in (*some, *others), "steps with slots"


def test_ranks_with_shares_of_experts(tmp_path: Path) -> None:
    check(LAYOUTS["TP2"], "experts", tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize(("layout", "name"), CELLS)
def test_ranks_of_every_layout(layout: str, name: str, tmp_path: Path) -> None:
    check(LAYOUTS[layout], name, tmp_path)
