"""Two attention groups in one process: the other one has the same requests, and so the same rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.groups import Group


class MirroredRank(Group):
    """The first of two ranks, of which each has all weights: what is shared out over them has been added up."""

    def __init__(self) -> None:
        super().__init__(0, 2)

    def _run_collective(self, what: str, x: torch.Tensor, collective: Callable[[], torch.Tensor]) -> torch.Tensor:
        return collective()

    def _gathered(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat((x, x), dim)

    def _scattered(self, x: torch.Tensor, exact: bool) -> torch.Tensor:
        return x[0].clone()


def mirror_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on runners have two groups."""
    groups = replace(parallel_state.groups(), dp=MirroredRank())
    monkeypatch.setattr(parallel_state, "groups", lambda: groups)
