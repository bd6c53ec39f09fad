"""Measuring with a faked clock and faked candidates: noise, what fails, and the end of the time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from sglang.measuring.points import Candidate, Point
from sglang.measuring.rounds import CANDIDATE_S, ROUNDS, CandidateProblem, measure
from sglang.srt.kernels.measured.decision import decide
from sglang.srt.kernels.measured.records import Question, Record


class FakeBench:
    """Candidates take the seconds that `times` says, and time passes by them alone. A text is what is wrong with one
    from the start, `inf` one that never answers. `log`: whose turn it was."""

    def __init__(self, times: dict[str, float | str], noise: float = 0.0) -> None:
        self.times, self.now, self.log = times, 0.0, list[str]()
        self.open_now, self._noise, self._draw = set[str](), noise, random.Random(1)

    def clock(self) -> float:
        return self.now

    def open(self, point: Point, candidate: Candidate, limit_s: float) -> FakeTimer:
        what = self.times[candidate.name]
        if what == float("inf"):
            self.now += limit_s
            raise TimeoutError
        self.now += 1.0
        if isinstance(what, str) and not what.startswith("later"):
            raise CandidateProblem(what)
        self.open_now.add(candidate.name)
        return FakeTimer(self, candidate.name)

    def turn(self, name: str) -> float:
        self.log.append(name)
        self.now += 1.0
        seconds = self.times[name]
        if isinstance(seconds, str):
            raise CandidateProblem(seconds)
        return seconds * self._draw.uniform(1 - self._noise, 1 + self._noise)


class FakeTimer:
    def __init__(self, bench: FakeBench, name: str) -> None:
        self._bench, self._name = bench, name

    def seconds(self, limit_s: float) -> float:
        return self._bench.turn(self._name)

    def close(self) -> None:
        self._bench.open_now.remove(self._name)


def points_of(names: Sequence[str], count: int = 1) -> list[Point]:
    candidates = tuple(Candidate(name, predicted=83e-6) for name in names)
    return [Point(Question("linear", "fp8_block", "64x64", number), (), candidates) for number in range(count)]


def choice(records: Sequence[Record]) -> str | None:
    decision = decide(records[0].candidate, {record.candidate: record for record in records})
    return None if decision is None else decision.chosen.candidate


def test_candidates_take_turns_and_a_faster_one_is_confirmed() -> None:
    bench = FakeBench({"table": 1e-4, "slower": 2e-4, "faster": 5e-5})
    (records,) = measure(points_of(list(bench.times)), bench, 60.0, bench.clock)
    assert bench.log == ["table", "slower", "faster"] * ROUNDS + ["table", "faster"] * ROUNDS
    assert [len(record.rounds) for record in records] == [6, 3, 6] and choice(records) == "faster"
    assert records[0].predicted == 83e-6 and not bench.open_now


def test_of_equals_in_20_percent_noise_the_tables_choice_stays() -> None:
    names = ["table", *(f"candidate {number}" for number in range(4))]
    bench = FakeBench(dict.fromkeys(names, 1e-4), noise=0.2)
    measured = list(measure(points_of(names, 60), bench, 1e9, bench.clock))
    assert [choice(records) for records in measured] == ["table"] * 60


def test_a_candidate_of_half_the_time_is_seen_through_20_percent_noise() -> None:
    bench = FakeBench({"table": 1e-4, "faster": 5e-5}, noise=0.2)
    measured = list(measure(points_of(["table", "faster"], 40), bench, 1e9, bench.clock))
    assert sum(choice(records) == "faster" for records in measured) >= 36


@pytest.mark.parametrize("problem", ["it crashes: its process ended with status -11", "its numbers are wrong"])
def test_what_crashes_or_is_wrong_never_wins(problem: str) -> None:
    bench = FakeBench({"table": 1e-4, "bad": problem, "faster": 5e-5})
    (records,) = measure(points_of(list(bench.times)), bench, 60.0, bench.clock)
    assert records[1].problem == problem and not records[1].rounds and choice(records) == "faster"


def test_one_that_crashes_while_it_is_timed_takes_no_more_turns() -> None:
    bench = FakeBench({"table": 1e-4, "bad": "later it crashes"})
    (records,) = measure(points_of(list(bench.times)), bench, 60.0, bench.clock)
    assert bench.log.count("bad") == 1 and records[1].problem == "later it crashes" and not records[1].rounds
    assert choice(records) == "table"


def test_one_that_hangs_costs_its_limit_and_no_more() -> None:
    bench = FakeBench({"table": 1e-4, "hangs": float("inf"), "faster": 5e-5})
    (records,) = measure(points_of(list(bench.times)), bench, 120.0, bench.clock)
    assert records[1].problem == "it hangs: no answer within 30 s" and choice(records) == "faster"
    assert bench.now == CANDIDATE_S + 2 + 2 * ROUNDS + 2 * ROUNDS


def test_a_table_that_fails_decides_nothing() -> None:
    bench = FakeBench({"table": "its numbers are wrong", "faster": 5e-5})
    (records,) = measure(points_of(list(bench.times)), bench, 60.0, bench.clock)
    assert choice(records) is None


@pytest.mark.parametrize(("seconds", "complete"), [(0.0, 0), (4.0, 0), (9.0, 1), (16.0, 2), (1e9, 5)])
def test_it_ends_in_time_and_what_is_half_measured_is_dropped(seconds: float, complete: int) -> None:
    bench = FakeBench({"table": 1e-4, "same": 1e-4})  # 2 + 6 seconds a point
    measured = list(measure(points_of(list(bench.times), 5), bench, seconds, bench.clock))
    assert len(measured) == complete and not bench.open_now
    assert bench.now <= seconds + 1.0, "as long as one answer more"
    assert all(len(record.rounds) == ROUNDS for records in measured for record in records)


def test_hanging_until_the_end_is_no_fault_of_the_candidate() -> None:
    bench = FakeBench({"hangs": float("inf")})
    assert list(measure(points_of(["hangs"]), bench, 20.0, bench.clock)) == [] and bench.now == 20.0
    ((record,),) = measure(points_of(["hangs"]), bench, 40.0, bench.clock)
    assert record.problem.startswith("it hangs")


def test_an_interrupt_keeps_what_is_complete() -> None:
    bench = FakeBench({"table": 1e-4, "same": 1e-4})
    turn: Callable[[str], float] = bench.turn

    def interrupted(name: str) -> float:
        if bench.now > 12:
            raise KeyboardInterrupt
        return turn(name)

    bench.turn = interrupted  # type: ignore[method-assign]
    measured = measure(points_of(list(bench.times), 5), bench, 60.0, bench.clock)
    assert len(next(measured)) == 2
    with pytest.raises(KeyboardInterrupt):
        next(measured)
    assert not bench.open_now
