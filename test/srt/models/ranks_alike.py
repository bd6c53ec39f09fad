"""Quantized checkpoints of tiny models on several ranks, beside one that has all of the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rank_processes import run_ranks

from sglang.srt.distributed import parallel_state
from sglang.srt.plan.ranks import RankLayout

from .harness import TinyRunner, plan_for

Steps = Callable[[TinyRunner], torch.Tensor]


def assert_ranks_alike(size: int, steps: Steps, tolerance: dict[str, Any], *checkpoints: Path) -> None:
    """Each of `size` ranks that share out a checkpoint at `quantized` below one of these folders gives what `steps`
    gives without others, and has as many bytes of weights as are planned."""
    run_ranks(_rank, (size, steps, checkpoints), size)
    for folder in checkpoints:
        want = steps(TinyRunner(plan_for(folder / "quantized")))
        for rank in range(size):
            torch.testing.assert_close(torch.load(folder / f"{rank}.pt"), want, **tolerance)


def _rank(rank: int, size: int, steps: Steps, checkpoints: tuple[Path, ...]) -> None:
    torch.set_num_threads(1)
    parallel_state.init(RankLayout(size), rank, "gloo", f"file://{checkpoints[0]}/rendezvous")
    for folder in checkpoints:
        plan = plan_for(folder / "quantized", tp_size=size)
        runner = TinyRunner(plan)
        assert sum(p.tensor.nbytes for p in runner.model.params.values()) == plan.weight_bytes()
        torch.save(steps(runner), folder / f"{rank}.pt")
    parallel_state.shutdown()
