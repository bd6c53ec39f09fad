"""Stages of a pipeline: balanced, complete, and as large as they are allocated."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.groups import groups_of
from sglang.srt.errors import UserError
from sglang.srt.models.causal_lm import CausalLM
from sglang.srt.plan.caches import cache_groups, row_tables
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.layout import check_layout
from sglang.srt.plan.rank_weights import rank_weights
from sglang.srt.plan.ranks import RankLayout
from sglang.srt.plan.stages import balanced_runs, caches_of_stage, cut_stages, fullest_caches
from sglang.srt.plan.weights import rank_weight_bytes
from srt.models.harness import plan_for, save_tiny


def test_runs_are_balanced_and_whole() -> None:
    assert balanced_runs([5, 1, 1, 1, 5], 3) == [range(1), range(1, 4), range(4, 5)]
    for weights, count in itertools.product(([1] * 7, [9, 1, 1, 1, 1, 1], [1, 2, 3, 4, 5], [0, 0, 8]), (1, 2, 3)):
        runs = balanced_runs(weights, count)
        assert [i for run in runs for i in run] == list(range(len(weights))) and all(runs) and len(runs) == count
        cuts = itertools.combinations(range(1, len(weights)), count - 1)
        best = min(max(sum(weights[a:b]) for a, b in itertools.pairwise((0, *cut, len(weights)))) for cut in cuts)
        assert max(sum(weights[i] for i in run) for run in runs) == best


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3", {}),
        ("qwen3_tied_bias", {}),
        ("qwen3_windows", {}),
        ("llama4", {}),
        ("inkling", {}),
        ("deepseek_v3", {}),
        ("qwen3_next", {}),
        ("kimi_linear", {}),
        ("gemma3", {}),
    ],
)
@pytest.mark.parametrize("ranks", [RankLayout(pp_size=2), RankLayout(2, pp_size=3)], ids=["PP2", "TP2 x PP3"])
def test_a_stage_allocates_what_it_counts(
    name: str, changes: dict[str, object], ranks: RankLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(name, tmp_path, **changes)
    plan = plan_for(tmp_path)
    model, parallel = (
        plan.description,
        ParallelConfig("float32", "float32", ranks=RankLayout(ranks.tp_size, pp_size=ranks.pp_size)),
    )
    held = rank_weights(model, ranks)
    stages = cut_stages(held, "float32")
    assert [i for stage in stages for i in stage.layers] == list(range(len(model.layers)))
    copied = model.vocab_size // ranks.tp_size * model.hidden_size * 4 if model.tie_embeddings else 0
    whole = rank_weight_bytes(rank_weights(model, RankLayout(ranks.tp_size)), "float32")
    assert sum(stage.weight_bytes for stage in stages) == pytest.approx(whole + copied, abs=4 * model.hidden_size)
    groups = cache_groups(model, parallel)
    for number, stage in enumerate(stages):
        of_rank = groups_of(ranks, number * ranks.tp_size)
        monkeypatch.setattr(parallel_state, "groups", lambda of_rank=of_rank: of_rank)
        plan.__dict__["description"] = stage.model  # cached properties
        plan.__dict__["weights"] = held.select_stage(stage.model)
        built = CausalLM(plan, device="meta")
        assert sum(param.tensor.nbytes for param in built.params.values()) == stage.weight_bytes
        caches = caches_of_stage(groups, stage.layers)
        stored = {(member.layer_id, member.cache.name) for group in caches for member in group.members}
        assert stored == {(store.layer_id, store.name) for store in built.caches}
        assert row_tables(caches) == row_tables(groups), "the scheduler of every rank has the same tables"
        for most, group in zip(fullest_caches(groups, stages), caches, strict=True):
            assert most.bytes_per_entry >= group.bytes_per_entry


@pytest.mark.parametrize(
    ("name", "pp_size", "message"),
    [
        (
            "qwen3",
            4,
            "--pp-size 4 is more than the model's 3 layers; what works: --tp-size 4 or --tp-size 2 --pp-size 2",
        ),
        # Five ranks are more than the four heads, too.
        ("qwen3", 5, "--pp-size 5 is more than the model's 3 layers; what works: --tp-size 1 --pp-size 3$"),
        ("gemma4_small_wide", 2, "layers attend to keys and values of earlier ones, which other stages would have"),
    ],
)
def test_what_cannot_be_cut_is_refused(name: str, pp_size: int, message: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    with pytest.raises(UserError, match=message):
        check_layout(plan_for(tmp_path).description, RankLayout(pp_size=pp_size))
