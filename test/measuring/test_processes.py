"""Candidates in processes of their own. Nothing here is timed: what answers is waited for, and what hangs never
answers."""

from __future__ import annotations

import os

import pytest
from fake_candidates import launch

from sglang.measuring.points import Candidate, Point
from sglang.measuring.processes import ProcessBench
from sglang.measuring.rounds import CandidateProblem
from sglang.srt.kernels.measured.records import Question

LONG, SHORT = 300.0, 0.2


def point_of(*names: str, tokens: int = 1) -> Point:
    return Point(Question("linear", "fp8_block", "64x64", tokens), (), tuple(map(Candidate, names)))


def test_each_failure_is_its_candidates_alone() -> None:
    names = ("good", "crashes", "wrong", "raises", "crashes later")
    point, said = point_of(*names), dict[str, str]()
    with ProcessBench(launch) as bench:
        good = bench.open(point, point.candidates[0], LONG)
        for candidate in point.candidates[1:]:
            with pytest.raises(CandidateProblem) as problem:
                bench.open(point, candidate, LONG).seconds(LONG)
            said[candidate.name] = str(problem.value)
        with pytest.raises(TimeoutError):
            bench.open(point, Candidate("hangs"), SHORT)
        process = good.seconds(LONG)
        assert process != os.getpid() and good.seconds(LONG) == process
        good.close()
        again = bench.open(point_of("good", tokens=2), point.candidates[0], LONG)
        assert again.seconds(LONG) == process, "what it has compiled stays for the next point"
        again.close()
    assert said == {
        "crashes": "it crashes: its process ended with status 3",
        "wrong": "its numbers are wrong",
        "raises": "RuntimeError: out of resources: shared memory",
        "crashes later": "it crashes: its process ended with status -11",
    }
    with pytest.raises(ProcessLookupError):
        os.kill(int(process), 0)
