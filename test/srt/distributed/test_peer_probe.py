"""The start-up probe among ranks of a CPU, with links that have a defect each: what is found among threads, and among
processes, which may die or hang."""

from __future__ import annotations

import os
import re
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from forked_servers import ForkedProgram, start_fork_server
from rank_processes import run_ranks

from sglang.srt.distributed import peer_checks, peer_links, peer_probe
from sglang.srt.distributed.peer_checks import PATTERN_WORDS, Finding, check, pattern
from sglang.srt.errors import UserError
from srt.distributed.fake_links import FakeLinks, Meeting

LINKS = "srt.distributed.fake_links:links"
TESTS = Path(__file__).resolve().parents[2]
LIMITS = peer_probe.Limits(total=100.0, step=2.0)

FOUND = {
    "": None,
    "stale memory": "ranks 0 and 1: rank 1 reads the values from before rank 0 wrote",
    "own buffer": "ranks 0 and 1: what rank 0 writes to rank 1 lands in its own memory",
    "torn memory": "ranks 0 and 1: 1 of 4096 words of rank 0 arrive altered",
    "copy that does not end": "ranks 0 and 1: a copy has not ended",
    "stale sum": "two_shot: rank [0-2] does not add what rank 0 gives",
}
OF_PROCESSES = {
    "hanging write": "ranks 0 and 1: a write to the memory of rank 1 does not return on rank 0",
    "hanging sum": "rank 0: the all-reduce by two_shot does not return on rank 0",
    "refused": r"rank 1: its start fails on rank 1: .*RuntimeError: peer access is not supported",
}
"""Processes take seconds to start. Links that are right, and some that read their own, are in test_peer_setup."""


def holds(defect: str, problem: str | None, expected: str | None) -> None:
    if expected is None:
        assert problem is None, (defect, problem)
        return
    assert problem is not None and re.search(expected, problem), (defect, problem)
    assert "IOMMU" in problem and "ACS" in problem and "expandable_segments" in problem and "driver" in problem


def findings_among_threads(ranks: int, defect: str) -> list[Finding]:
    meeting, findings = Meeting(ranks), [list[Finding]() for _ in range(ranks)]

    def run(rank: int) -> None:
        links = FakeLinks(rank, ranks, defect, partial(meeting.exchange, rank))
        try:
            findings[rank].extend(check(links, rank, ranks, lambda doing, peer: None))
        except threading.BrokenBarrierError:
            pass  # another rank has gone
        finally:
            if findings[rank] and findings[rank][-1].kind == "hang":
                meeting.leave()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [finding for each in findings for finding in each]


@pytest.mark.values
@pytest.mark.parametrize("defect", FOUND)
@pytest.mark.parametrize("ranks", [3, 2])  # most defects have the first one in `make test`
def test_defects_are_named(ranks: int, defect: str) -> None:
    holds(defect, peer_probe.verdict(findings_among_threads(ranks, defect)), FOUND[defect])


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (pattern(0, 1, 1), Finding("wrong", (0, 1), "what rank 0 writes to rank 1 lands in the memory of rank 2")),
        (pattern(2, 1, 1), Finding("own", (2, 1), "what rank 2 writes to rank 1 lands in its own memory")),
        (pattern(0, 1, 1) + 1, Finding("wrong", (2,), "rank 2 finds values that no rank wrote at a place in its memory"
                                       " where nobody writes")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("place", [2, 0])
def test_the_rank_whose_write_went_astray_is_blamed(words: torch.Tensor, wanted: Finding, place: int) -> None:
    """Rank 2 finds the words at its own place, where nobody writes, or at that of rank 0."""
    memory = {writer: pattern(writer, 2, 1) for writer in (0, 1)} | {2: torch.zeros(PATTERN_WORDS, dtype=torch.int32)}
    memory[place] = words
    links: Any = SimpleNamespace(write=lambda peer, words: None, read=memory.__getitem__, barrier=lambda: None)
    (found,) = peer_checks._check_memory(links, 2, 3, 1, lambda action, peer: None)
    if place == 0 and wanted.pair == (2,):
        wanted = Finding("wrong", (0, 2), f"{PATTERN_WORDS} of {PATTERN_WORDS} words of rank 0 arrive altered")
    assert found == wanted


def test_a_library_that_adds_wrongly_stops_the_start() -> None:
    findings = findings_among_threads(2, "wrong library")
    with pytest.raises(UserError, match=r"NCCL does not add up over these GPUs: .*NCCL_P2P_DISABLE=1"):
        peer_probe.verdict(findings)


def probe(rank: int, ranks: int, folder: str) -> None:
    start_fork_server()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    with patch.object(peer_probe.subprocess, "Popen", ForkedProgram):  # to import torch takes them two seconds each
        for defect, expected in OF_PROCESSES.items():
            os.environ["FAKE_DEFECT"] = defect
            holds(defect, peer_probe.probe(dist.group.WORLD, 0, LINKS, LIMITS), expected)
    dist.barrier()
    dist.destroy_process_group()  # whose threads must not outlive the process's end


@pytest.mark.slow
def test_processes_that_die_or_hang_are_named_and_do_not_hang_the_server(tmp_path: Path) -> None:
    run_ranks(probe, (2, str(tmp_path)), 2)


def test_a_pair_is_told_once() -> None:
    findings = [
        Finding("stale", (0, 1), "rank 1 reads the values from before rank 0 wrote"),
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
    messages = [{"doing": "the all-reduce by nccl", "peer": None}]
    assert [finding.kind for finding in peer_probe._read(messages, "", 0)] == ["library"]
    assert [finding.kind for finding in peer_probe._read(messages, "DistBackendError: no socket", 0)] == ["failed"]


def test_only_what_ends_by_itself_has_the_short_limit() -> None:
    limits = peer_probe.Limits()
    assert limits.of_step("a write to the memory of") == limits.of_step("the all-reduce by packed") == limits.step
    assert limits.of_step("the other ranks") == limits.of_step("the all-reduce by nccl") == limits.total
    assert peer_links.DEADLINE_S < limits.step < limits.total
