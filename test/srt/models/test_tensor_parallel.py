"""Two (or four) ranks over gloo compute what one rank computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from sglang.srt.distributed import parallel_state

from .harness import TinyRunner, plan_for, random_tokens, save_tiny

TOKENS = random_tokens(20, seed=1)


def _steps(runner: TinyRunner) -> torch.Tensor:
    extended = runner.extend({2: TOKENS[:12], 1: TOKENS[5:9]})
    return torch.cat((*extended, *(runner.decode({1: TOKENS[9], 2: token}) for token in TOKENS[12:])))


def _rank(rank: int, size: int, folder: Path, names: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    parallel_state.init(rank, size, "gloo", f"file://{folder}/rendezvous")
    for name in names:
        plan = plan_for(folder / name)
        runner = TinyRunner(plan, tp_size=size)
        held = sum(p.tensor.nbytes for p in runner.model.params.values())
        assert held == plan.weight_bytes(size), "the plan counts other bytes than a rank allocates"
        torch.save(_steps(runner), folder / f"{name}{rank}.pt")
    parallel_state.shutdown()


@pytest.mark.parametrize(
    ("size", "names"),
    [
        (2, ("qwen3_moe_mixed", "llama_bias_llama3", "qwen3_tied_bias", "glm4_moe", "qwen2_moe", "gpt_oss")),
        (2, ("deepseek_v2_lite", "deepseek_v3")),
        (2, ("qwen3_next", "qwen3_5", "qwen3_5_moe", "nemotron_h", "nemotron_h_latent")),
        # 2 kv heads are held twice, 251 tokens do not divide; norms are over what four ranks hold.
        (4, ("qwen3_tied_bias", "minimax_m2", "glm4_moe", "mixtral")),
    ],
)
def test_ranks_agree_with_one_rank(size: int, names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        save_tiny(name, tmp_path / name)
    mp.spawn(_rank, (size, tmp_path, names), nprocs=size)
    for name in names:
        want = _steps(TinyRunner(plan_for(tmp_path / name)))
        for rank in range(size):
            torch.testing.assert_close(torch.load(tmp_path / f"{name}{rank}.pt"), want, rtol=0.0, atol=1e-4)
