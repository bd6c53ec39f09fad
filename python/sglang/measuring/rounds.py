"""Measures points one after the other within a number of seconds: candidates take turns, three rounds each.

What crashes, hangs or computes something wrong is left out, and recorded with its reason. A candidate that looks faster
than the tables' choice takes three more rounds in turn with it, since of many candidates one is lucky.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar

from sglang.measuring.points import Candidate, Point
from sglang.srt.kernels.measured.decision import is_faster
from sglang.srt.kernels.measured.records import Record

ROUNDS = 3
CANDIDATE_S = 30.0
"""Seconds after which a candidate that has not answered is given up: it compiles in less."""
Clock = Callable[[], float]


class CandidateProblem(Exception):
    """Raised for a candidate that cannot be chosen; its text is the reason."""


class Timer(Protocol):
    """A candidate that is ready to be timed: its result is the reference's."""

    def seconds(self, limit_s: float) -> float:
        """Returns the seconds of the point's ops. Raises CandidateProblem, and TimeoutError after `limit_s`
        seconds."""

    def close(self) -> None:
        """Gives its buffers back."""


class Bench(Protocol):
    """What runs candidates, each where it can harm no other."""

    def open(self, point: Point, candidate: Candidate, limit_s: float) -> Timer:
        """Compiles a candidate and compares its result with the reference. Raises as `Timer.seconds`."""


class OutOfTime(Exception):
    """Raised where the seconds are over before a point is measured: what is known of it decides nothing."""


def measure(points: Iterable[Point], bench: Bench, seconds: float, clock: Clock) -> Iterator[tuple[Record, ...]]:
    """Yields the records of each point, in order, until `seconds` are over or an interrupt ends it; the records of the
    points before are complete. The last point may take as long as one answer of a candidate beyond that."""
    end = clock() + seconds
    for point in points:
        if clock() >= end:
            return
        try:
            yield _measured(point, bench, end, clock)
        except OutOfTime:
            return


def _measured(point: Point, bench: Bench, end: float, clock: Clock) -> tuple[Record, ...]:
    timers: dict[str, Timer] = {}
    problems: dict[str, str] = {}
    try:
        for candidate in point.candidates:
            try:
                timers[candidate.name] = _until(end, clock, partial(bench.open, point, candidate))
            except CandidateProblem as problem:
                problems[candidate.name] = str(problem)
        rounds: dict[str, list[float]] = {name: [] for name in timers}
        _take_turns(timers, rounds, problems, end, clock)
        table = point.candidates[0].name
        if table not in problems:
            records = {each.candidate: each for each in _records(point, rounds, problems)}
            again = {name for name in records if is_faster(records[name], records[table])}
            if again:
                _take_turns({name: timers[name] for name in (table, *again)}, rounds, problems, end, clock)
        return _records(point, rounds, problems)
    finally:
        for timer in timers.values():
            timer.close()


def _records(point: Point, rounds: Mapping[str, Sequence[float]], problems: Mapping[str, str]) -> tuple[Record, ...]:
    return tuple(
        point.record(each, tuple(rounds.get(each.name, ())), problems.get(each.name, "")) for each in point.candidates
    )


def _take_turns(
    timers: Mapping[str, Timer],
    rounds: Mapping[str, list[float]],
    problems: dict[str, str],
    end: float,
    clock: Clock,
) -> None:
    """Times every candidate once, then again: ROUNDS times. One with a problem takes no more turns."""
    for _ in range(ROUNDS):
        for name, timer in timers.items():
            if name in problems:
                continue
            try:
                rounds[name].append(_until(end, clock, timer.seconds))
            except CandidateProblem as problem:
                problems[name] = str(problem)


T = TypeVar("T")


def _until(end: float, clock: Clock, ask: Callable[[float], T]) -> T:
    """Returns what a candidate answers. Raises CandidateProblem if it takes CANDIDATE_S, and OutOfTime if the seconds
    of the measurement are over before."""
    left = end - clock()
    if left <= 0:
        raise OutOfTime
    try:
        return ask(min(CANDIDATE_S, left))
    except TimeoutError:
        if left < CANDIDATE_S:
            raise OutOfTime from None
        raise CandidateProblem(f"it hangs: no answer within {CANDIDATE_S:.0f} s") from None
