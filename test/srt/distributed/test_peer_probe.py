"""The start-up probe among processes of a CPU, with links that have a defect each."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from sglang.srt.distributed import peer_probe
from sglang.srt.distributed.peer_checks import Finding
from sglang.srt.errors import UserError

LINKS = "srt.distributed.fake_links:links"
TESTS = Path(__file__).resolve().parents[2]

QUICK = {
    "": None,
    "stale memory": "ranks 0 and 1: rank 1 reads what was there before rank 0 wrote",
    "own buffer": "ranks 0 and 1: what rank 0 writes to rank 1 lands in its own memory",
    "torn memory": "ranks 0 and 1: 1 of 4096 words of rank 0 arrive otherwise",
    "copy that does not end": "ranks 0 and 1: a copy has not ended",
    "stale sum": "two_shot: rank [0-2] does not add what rank 0 gives",
    "refused": r"rank 1: its start fails on rank 1: .*RuntimeError: peer access is not supported",
}
HANGING = {
    "hanging write": "ranks 0 and 1: a write to the memory of rank 1 does not return on rank 0",
    "hanging sum": "rank 0: the all-reduce by two_shot does not return on rank 0",
}


def probe(rank: int, ranks: int, folder: str, defects: dict[str, str | None], timeout: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    for defect, expected in defects.items():
        os.environ["FAKE_DEFECT"] = defect
        problem = peer_probe.probe(dist.group.WORLD, 0, LINKS, timeout)
        if expected is None:
            assert problem is None, problem
            continue
        assert problem is not None and re.search(expected, problem), (defect, problem)
        assert "IOMMU" in problem and "ACS" in problem and "expandable_segments" in problem and "driver" in problem
    os.environ["FAKE_DEFECT"] = "wrong library"
    if timeout > 60:
        with pytest.raises(UserError, match="NCCL does not add up over these GPUs: .*NCCL_P2P_DISABLE=1"):
            peer_probe.probe(dist.group.WORLD, 0, LINKS, timeout)


@pytest.mark.slow
def test_defects_are_named(tmp_path: Path) -> None:
    mp.spawn(probe, (2, str(tmp_path), QUICK, 100.0), nprocs=2)


@pytest.mark.slow
def test_hanging_links_are_named_and_do_not_hang_the_server(tmp_path: Path) -> None:
    mp.spawn(probe, (3, str(tmp_path), HANGING, 45.0), nprocs=3)


def test_a_pair_is_told_once() -> None:
    findings = [
        Finding("stale", (0, 1), "rank 1 reads what was there before rank 0 wrote"),
        Finding("stale", (1, 0), "again"),
        Finding("waited", (2,), "the other ranks does not return on rank 2"),
    ]
    text = peer_probe.verdict(findings)
    assert text is not None and text.startswith("ranks 0 and 1: rank 1 reads") and "again" not in text
    assert "rank 2" not in text
    assert "rank 2" in (peer_probe.verdict(findings[2:]) or "")
    assert peer_probe.verdict([]) is None


def test_a_library_that_cannot_start_is_no_wrong_sum() -> None:
    """The server's own start says more of it."""
    doing = json.dumps({"doing": "the all-reduce by nccl", "peer": None})
    assert [finding.kind for finding in peer_probe._read(doing, "", 0)] == ["library"]
    assert [finding.kind for finding in peer_probe._read(doing, "DistBackendError: no socket", 0)] == ["failed"]
