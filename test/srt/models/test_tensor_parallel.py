"""Two (or four) ranks over gloo compute what one rank computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from srt.models.harness import TinyRunner, plan_for, random_tokens, save_tiny

from sglang.srt.distributed import parallel_state
from sglang.srt.plan.weights import weight_bytes

TOKENS = random_tokens(20, seed=1)


def _steps(runner: TinyRunner) -> torch.Tensor:
    extended = runner.extend({2: TOKENS[:12], 1: TOKENS[5:9]})
    return torch.cat((*extended, *(runner.decode({1: TOKENS[9], 2: token}) for token in TOKENS[12:])))


def _rank(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    parallel_state.init(rank, size, "gloo", f"file://{folder}/rendezvous")
    plan = plan_for(Path(folder))
    runner = TinyRunner(plan, tp_size=size)
    held = sum(p.tensor.nbytes for p in runner.model.params.values())
    assert held == weight_bytes(plan.model, size), "the plan counts other bytes than a rank allocates"
    torch.save(_steps(runner), f"{folder}/rank{rank}.pt")
    parallel_state.shutdown()


@pytest.mark.parametrize(
    ("name", "size"),
    [("qwen3_moe_mixed", 2), ("llama_bias_llama3", 2), ("qwen3_tied_bias", 4)],  # 4 ranks share 2 kv heads
)
def test_ranks_agree_with_one_rank(name: str, size: int, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    want = _steps(TinyRunner(plan_for(tmp_path)))
    mp.spawn(_rank, (size, str(tmp_path)), nprocs=size)
    for rank in range(size):
        torch.testing.assert_close(torch.load(tmp_path / f"rank{rank}.pt"), want, rtol=0.0, atol=1e-4)


def test_a_vocabulary_that_does_not_divide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from srt.models import harness

    monkeypatch.setitem(harness.SIZES, "vocab_size", 251)
    save_tiny("qwen3", tmp_path)
    global TOKENS
    monkeypatch.setattr(__import__("sys").modules[__name__], "TOKENS", [t % 251 for t in TOKENS])
    want = _steps(TinyRunner(plan_for(tmp_path)))
    assert want.shape[1] == 251
