"""Attention groups with requests of their own: flags, layouts, and weights and caches of a rank."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.groups import groups_of
from sglang.srt.errors import UserError
from sglang.srt.models.causal_lm import CausalLM
from sglang.srt.plan.caches import cache_groups
from sglang.srt.plan.draft_plan import layout_of_draft
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.layout import check_layout
from sglang.srt.plan.memory import GATHER_BYTES, _attention_sizes, activation_bytes, graph_bytes
from sglang.srt.plan.pool_sizes import CacheCost
from sglang.srt.plan.rank_weights import rank_weights
from sglang.srt.plan.ranks import ONE_RANK, RankLayout
from sglang.srt.plan.sizes import Sizes
from sglang.srt.plan.weights import rank_weight_bytes
from sglang.srt.server_args import ServerArgs
from srt.models.harness import plan_for, save_tiny


@pytest.mark.parametrize(
    ("words", "groups", "replicas"),
    [
        ("--tp 4 --enable-dp-attention", 4, 1),
        ("--tp 4 --dp-size 2 --enable-dp-attention", 2, 1),
        ("--tp 4 --attn-dp-size 2", 2, 1),
        ("--tp 4 --attention-data-parallel-size 2 --enable-dp-attention --enable-dp-lm-head", 2, 1),
        ("--tp 4 --dp-size 2 --attn-dp-size 2 --enable-dp-attention", 2, 2),
        ("--tp 1 --enable-dp-attention", 1, 1),
    ],
)
def test_flags_name_the_groups(words: str, groups: int, replicas: int) -> None:
    args = ServerArgs.from_cli(["--model-path", "x", *words.split()])
    assert (args.attn_dp_size, args.dp_size, args.enable_dp_attention) == (groups, replicas, groups > 1)
    assert replace(args) == args, "what the flags mean is settled once"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tp 4 --attn-dp-size 3", "--attn-dp-size 3 does not divide --tp-size 4"),
        ("--tp 2 --attn-dp-size 2 --mm-enable-dp-encoder", "groups encode images of their own"),
        ("--tp 2 --enable-dp-lm-head", "it needs --enable-dp-attention"),
    ],
)
def test_what_does_not_go_together_is_refused(words: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ServerArgs.from_cli(["--model-path", "x", *words.split()])


def test_groups_that_draft_have_the_whole_vocabulary() -> None:
    words = ["--model-path", "x", "--tp", "4", "--attn-dp-size", "2"]
    assert not ServerArgs.from_cli(words).enable_dp_lm_head
    assert ServerArgs.from_cli([*words, "--speculative-algorithm", "NGRAM"]).enable_dp_lm_head


def test_a_group_has_a_draft_of_its_own() -> None:
    """Its experts are shared by the ranks of the group alone, and its heads as those of the target."""
    draft: Any = SimpleNamespace(model=SimpleNamespace(experts=object()))

    def layout(ranks: RankLayout) -> RankLayout:
        return layout_of_draft(ranks, draft)

    assert layout(RankLayout(4, 4, attn_dp_size=4, dp_lm_head=True)) == ONE_RANK
    assert layout(RankLayout(4, attn_dp_size=2, dp_lm_head=True)) == RankLayout(2)
    assert layout(RankLayout(4, 2, pp_size=2)) == RankLayout(4, 2)
    groups = groups_of(RankLayout(4, 2, attn_dp_size=2, dp_lm_head=True), 3).draft_groups
    assert (groups.tp, groups.experts, groups.vocabulary) == (groups.attention,) * 3
    assert (groups.ep.size, groups.expert_tp.size, groups.expert_tp.rank, groups.dp.size) == (1, 2, 1, 1)
    alike = groups_of(RankLayout(4), 3)
    assert alike.draft_groups is alike


LAYOUTS = [
    RankLayout(2, attn_dp_size=2),
    RankLayout(4, attn_dp_size=2),
    RankLayout(4, attn_dp_size=4, dp_lm_head=True),
    RankLayout(4, attn_dp_size=2, dp_lm_head=True),
]


@pytest.mark.parametrize("ranks", LAYOUTS, ids=lambda ranks: ranks.flags)
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "kimi_linear", "gemma4_small", "qwen4_exp"])
def test_a_rank_allocates_what_it_counts(
    name: str, ranks: RankLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(name, tmp_path)
    plan = plan_for(tmp_path)
    model = plan.description
    check_layout(model, ranks)
    weights = rank_weights(model, ranks)
    plan.__dict__["ranks"], plan.__dict__["weights"] = ranks, weights
    monkeypatch.setattr(parallel_state, "groups", lambda: groups_of(ranks, ranks.tp_size - 1))
    built = CausalLM(plan, device="meta")
    assert sum(param.tensor.nbytes for param in built.params.values()) == rank_weight_bytes(weights, "float32")


def test_a_rank_has_the_cache_of_its_group_alone(tmp_path: Path) -> None:
    """All KV heads of its own requests; and the activations of everybody's rows."""
    save_tiny("qwen3", tmp_path)
    model = plan_for(tmp_path).description

    def entry(ranks: RankLayout) -> int:
        parallel = ParallelConfig(
            "float32", "float32", ranks=RankLayout(ranks.tp_size, attn_dp_size=ranks.attn_dp_size)
        )
        return sum(group.bytes_per_entry for group in cache_groups(model, parallel))

    assert entry(RankLayout(2, attn_dp_size=2)) == entry(ONE_RANK) == 2 * entry(RankLayout(2))
    assert entry(RankLayout(4, attn_dp_size=2)) == entry(RankLayout(2))
    shared, groups = (activation_bytes(model, "float32", 64, RankLayout(2, attn_dp_size=size)) for size in (1, 2))
    assert shared < groups < 3 * shared


def test_graphs_of_groups_that_share_the_vocabulary_have_the_logits_of_all(tmp_path: Path) -> None:
    save_tiny("qwen3_moe", tmp_path)
    model = plan_for(tmp_path).description

    def planned(*, dp_lm_head: bool) -> int:
        ranks = RankLayout(4, attn_dp_size=4, dp_lm_head=dp_lm_head)
        return graph_bytes(model, "bfloat16", Sizes(8, 64, 64, (1, 8), 1, ranks))

    assert planned(dp_lm_head=False) - planned(dp_lm_head=True) == 2 * 3 * 8 * model.vocab_size * 4


def test_gathered_entries_are_those_of_a_whole_context(tmp_path: Path) -> None:
    save_tiny("deepseek_v3", tmp_path)
    model, cost = plan_for(tmp_path).description, CacheCost(Fraction(1), shared_entry=100)
    sizes = [
        _attention_sizes(model, Sizes(8, 64, 64, (1,), 1, RankLayout(2, dcp_size=ranks)), 100, 1 << 20, cost)
        for ranks in (1, 2)
    ]
    assert [size.gathered for size in sizes] == [0, 64 * (100 + GATHER_BYTES)]
    assert [size.gathered_tokens for size in sizes] == [0, 64]
