"""Several ranks over gloo compute what one rank computes, whatever they share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from sglang.srt.distributed import parallel_state
from sglang.srt.plan.ranks import RankLayout

from .harness import TinyRunner, plan_for, random_tokens, save_tiny

TOKENS = random_tokens(20, seed=1)
EXPERTS = ("qwen3_moe_mixed", "glm4_moe", "gpt_oss", "deepseek_v2_lite", "deepseek_v3", "qwen3_5_moe")


def _steps(runner: TinyRunner) -> torch.Tensor:
    extended = runner.extend({2: TOKENS[:12], 1: TOKENS[5:9]})
    return torch.cat((*extended, *(runner.decode({1: TOKENS[9], 2: token}) for token in TOKENS[12:])))


def _rank(rank: int, ranks: RankLayout, folder: Path, names: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    parallel_state.init(ranks, rank, "gloo", f"file://{folder}/rendezvous")
    for name in names:
        plan = plan_for(folder / name, tp_size=ranks.tp_size, ep_size=ranks.ep_size)
        runner = TinyRunner(plan)
        held = sum(p.tensor.nbytes for p in runner.model.params.values())
        assert held == plan.weight_bytes(), "the plan counts other bytes than a rank allocates"
        torch.save(_steps(runner), folder / f"{name}{rank}.pt")
    parallel_state.shutdown()


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (
            RankLayout(2),
            ("qwen3_moe_mixed", "llama_bias_llama3", "qwen3_tied_bias", "glm4_moe", "qwen2_moe", "gpt_oss"),
        ),
        (RankLayout(2), ("deepseek_v2_lite", "deepseek_v3")),
        (RankLayout(2), ("qwen3_next", "qwen3_5", "qwen3_5_moe", "nemotron_h", "nemotron_h_latent")),
        # 2 kv heads are held twice, 251 tokens do not divide; norms are over what four ranks hold.
        (RankLayout(4), ("qwen3_tied_bias", "minimax_m2", "glm4_moe", "mixtral")),
        (RankLayout(2, 2), (*EXPERTS, "nemotron_h_latent")),
        (RankLayout(4, 2), ("glm4_moe", "deepseek_v3", "minimax_m2")),
    ],
    ids=lambda value: value.flags if isinstance(value, RankLayout) else value[0],
)
def test_ranks_agree_with_one_rank(ranks: RankLayout, names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        save_tiny(name, tmp_path / name)
    mp.spawn(_rank, (ranks, tmp_path, names), nprocs=ranks.tp_size)
    for name in names:
        want = _steps(TinyRunner(plan_for(tmp_path / name)))
        for rank in range(ranks.tp_size):
            torch.testing.assert_close(torch.load(tmp_path / f"{name}{rank}.pt"), want, rtol=0.0, atol=1e-4)
