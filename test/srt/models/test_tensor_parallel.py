"""Several ranks over gloo compute what one rank computes, for every family, whatever they share.

`make test` has each kind of model on two ranks, and in other layouts one of each kind of attention, and of each way to
route tokens to experts. `make thorough` has every form in each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import KINDS, kinds, smallest_kinds
from rank_processes import run_ranks

from sglang.srt.distributed import parallel_state
from sglang.srt.errors import UserError
from sglang.srt.plan.layout import check_layout
from sglang.srt.plan.ranks import RankLayout

from .harness import FURTHER_FORMS, TINY, TinyRunner, plan_for, random_tokens, save_tiny

TOKENS = random_tokens(30, seed=1)
EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")
NAMES = tuple(name for name in TINY if "wide" not in name)
"""Of 4 heads and 2 kv heads: four ranks hold each kv head twice, and norms over all heads are sums over the ranks."""
WITH_EXPERTS = tuple(name for name in NAMES if any(key in str(TINY[name][1]) for key in EXPERT_KEYS))
UNEVEN = {
    "kv_heads": ("glm4_moe", {"num_attention_heads": 8, "num_key_value_heads": 4, "moe_intermediate_size": 40}),
    "whole_norm": ("minimax_m2", {"num_attention_heads": 8, "num_key_value_heads": 4}),
    "gates": ("qwen3_next", {"num_key_value_heads": 4, "linear_num_key_heads": 3, "linear_num_value_heads": 6}),
}
"""Of heads and dims that three ranks have in runs of two lengths: the families, and what of them is changed."""
TWO_KEY_HEADS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
"""Whose recurrent layers two ranks share at most."""
FEW_KEY_HEADS = tuple(name for name in NAMES if TINY[name][1].get("linear_num_key_heads") == 2)
TWO_OUTPUT_GROUPS = tuple(name for name in TINY if TINY[name][1].get("o_groups") == 2)
"""Whose grouped output projections two ranks share at most."""
FOR_FOUR = tuple(name for name in NAMES if name not in (*FEW_KEY_HEADS, *TWO_OUTPUT_GROUPS))
KIND_NAMES = dict.fromkeys((*smallest_kinds(), *kinds(lacking="repeats, embedded, for ranks")))
QUICK_ON_TWO = tuple({KINDS[name].tiny: None for name in KIND_NAMES if KINDS[name].tiny not in FURTHER_FORMS})
QUICK_ON_FOUR = ("qwen3", "qwen3_moe", "minimax_m3", "mimo_v2", "llama4", "inkling", "nemotron_h", "kimi_linear")
"""Latents, sinks, and norms over all heads are on four ranks where these have experts of their own."""
QUICK_EXPERTS = (
    "qwen3_moe", "qwen3_next", "deepseek_v3", "minimax_m3", "gpt_oss", "llama4", "inkling", "step3p7", "nemotron_h",
    "gemma4_moe", "deepseek_v4_small", "qwen4_exp_small",
)  # fmt: skip


def _steps(runner: TinyRunner) -> torch.Tensor:
    """Beyond the windows, a part of one prompt over its cache."""
    first = runner.extend({2: TOKENS[:15], 1: TOKENS[5:9]})
    second = runner.extend({2: TOKENS[15:24]})
    return torch.cat((*first, *second, *(runner.decode({1: TOKENS[9], 2: token}) for token in TOKENS[24:])))


def _rank(rank: int, ranks: RankLayout, folder: Path, names: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    parallel_state.init(ranks, rank, "gloo", f"file://{folder}/rendezvous")
    for name in names:
        plan = plan_for(folder / name, tp_size=ranks.tp_size, ep_size=ranks.ep_size)
        runner = TinyRunner(plan)
        held = sum(p.tensor.nbytes for p in runner.model.params.values())
        assert held == plan.weight_bytes(), f"{name}: the plan counts other bytes than a rank allocates"
        torch.save(_steps(runner), folder / f"{name}{rank}.pt")
    parallel_state.shutdown()


Models = Callable[[str], tuple[Path, torch.Tensor]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Where each is, and what one rank computes."""
    folder = tmp_path_factory.mktemp("models")

    @functools.cache
    def of(name: str) -> tuple[Path, torch.Tensor]:
        family, changes = UNEVEN.get(name, (name, {}))
        save_tiny(family, folder / name, **changes)
        return folder / name, _steps(TinyRunner(plan_for(folder / name)))

    return of


def parts(ranks: RankLayout, names: tuple[str, ...], quick: tuple[str, ...], id: str) -> list[Any]:
    """Those of `make test`, and the others."""
    others = tuple(name for name in names if name not in quick)
    return [
        pytest.param(ranks, quick, id=id),
        pytest.param(ranks, others, id=f"{id}, others", marks=pytest.mark.thorough),
    ]


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        *parts(RankLayout(2), NAMES, QUICK_ON_TWO, "TP2"),
        pytest.param(
            RankLayout(3), ("qwen3_tied_bias", "qwen3_moe", "deepseek_v3", "gpt_oss", "gemma4_moe", *UNEVEN), id="TP3"
        ),
        *parts(RankLayout(4), FOR_FOUR, QUICK_ON_FOUR, "TP4"),
        *parts(RankLayout(2, 2), WITH_EXPERTS, QUICK_EXPERTS, "EP2"),
        pytest.param(RankLayout(4, 2), ("glm4_moe", "deepseek_v3", "minimax_m2", "gpt_oss"), id="EP2 x TP2"),
    ],
)
def test_ranks_agree_with_one_rank(ranks: RankLayout, names: tuple[str, ...], models: Models, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).symlink_to(models(name)[0])
    run_ranks(_rank, (ranks, tmp_path, names), ranks.tp_size)
    for name in names:
        for rank in range(ranks.tp_size):
            got = torch.load(tmp_path / f"{name}{rank}.pt")
            torch.testing.assert_close(
                got, models(name)[1], rtol=0.0, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("name", TWO_KEY_HEADS)
def test_ranks_without_a_key_head_are_refused(name: str, models: Models) -> None:
    problem = "2 key heads of gated delta nets; what works: --tp-size 2 --pp-size 2 or .* --tp-size 1, 2"
    with pytest.raises(UserError, match=problem):
        check_layout(plan_for(models(name)[0]).description, RankLayout(4))
