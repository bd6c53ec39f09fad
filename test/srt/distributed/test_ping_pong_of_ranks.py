"""Two ranks whose steps run as two halves: sums over gloo, and a rank that dies inside a half."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import pytest
import torch

from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.groups import Group
from sglang.srt.distributed.ping_pong import CpuSideStream, PingPong
from sglang.srt.plan.ranks import RankLayout

pytestmark = pytest.mark.failures
SUMS, LIMIT_S = 4, 120.0


def _microbatch(group: Group, first: float, dies_at: int | None) -> list[float]:
    """The sums over the ranks of `first` + i; every other one as rows that are gathered."""
    found = []
    for i in range(SUMS):
        if i == dies_at:
            os._exit(9)
        x = torch.full((2, 1), first + i + group.rank)
        found.append(float(group.all_reduce(x)[0] if i % 2 else group.all_gather_rows(x).sum() / 2))
    return found


def _rank(rank: int, folder: Path, dies: bool) -> None:
    parallel_state.init(RankLayout(2), rank, "gloo", f"file://{folder}/meet.{dies}", timeout_s=10.0)
    group, ping_pong = parallel_state.groups().tp, PingPong(CpuSideStream())
    group.alternate_in(ping_pong)
    try:
        found = ping_pong.run(
            lambda: _microbatch(group, 0.0, None),
            lambda: _microbatch(group, 100.0, SUMS // 2 if dies and rank else None),
        )
        (folder / f"{rank}.json").write_text(json.dumps(found))
    except RuntimeError as error:
        (folder / f"{rank}.error").write_text(f"{ping_pong.active} {type(error).__name__}")
    os._exit(0)  # without a meeting of those who are left


def _run(folder: Path, dies: bool) -> None:
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=_rank, args=(rank, folder, dies)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(LIMIT_S)
        assert process.exitcode is not None, "a rank waits for good"


def test_sums_of_both_microbatches_are_those_of_all_ranks(tmp_path: Path) -> None:
    _run(tmp_path, dies=False)
    wanted = [[2 * (first + i) + 1.0 for i in range(SUMS)] for first in (0.0, 100.0)]
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)] == [wanted, wanted]


def test_a_rank_that_dies_inside_a_half_ends_both_microbatches_of_the_other(tmp_path: Path) -> None:
    _run(tmp_path, dies=True)
    assert (tmp_path / "0.error").read_text().startswith("False ") and not (tmp_path / "1.json").exists()
