"""Two halves that take turns: their order, their collectives' results, and what one's failure does to the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sglang.srt.distributed.turns import HalvesDiffer, LateLane, Turns


def half(turns: Turns, log: list[str], name: str, count: int = 3) -> Callable[[], float]:
    """Adds 1 to what travels, `count` times, and logs when it computes, sends and receives."""

    def run() -> float:
        x = torch.zeros(1)
        for i in range(count):
            log.append(f"{name}{i}")

            def collective(x: torch.Tensor = x, i: int = i) -> torch.Tensor:
                log.append(f"~{name}{i}")
                return x.add_(1)

            x = turns.travel(("sum", i), collective)
        return float(x)

    return run


def test_halves_alternate_and_collectives_arrive_late_in_the_order_in_which_they_were_sent() -> None:
    turns, log = Turns(LateLane()), list[str]()
    for _ in range(2):  # nothing is left of the first run
        log.clear()
        assert turns.run(half(turns, log, "a"), half(turns, log, "b")) == (3.0, 3.0)
        assert not turns.under_way
        assert log == ["a0", "b0", "~a0", "a1", "~b0", "b1", "~a1", "a2", "~b1", "b2", "~a2", "~b2"]


def test_a_half_without_collectives_runs_before_the_other_goes_on() -> None:
    turns, log = Turns(LateLane()), list[str]()
    assert turns.run(half(turns, log, "a", 0), half(turns, log, "b", 0)) == (0.0, 0.0)
    assert turns.run(half(turns, log, "a", 2), half(turns, log, "b", 0)) == (2.0, 0.0)


@pytest.mark.parametrize(("counts", "what"), [((1, 2), "second"), ((0, 1), "second")])
def test_a_second_half_that_would_overtake_is_refused(counts: tuple[int, int], what: str) -> None:
    turns, log = Turns(LateLane()), list[str]()
    with pytest.raises(HalvesDiffer, match=what):
        turns.run(half(turns, log, "a", counts[0]), half(turns, log, "b", counts[1]))
    assert turns.run(half(turns, log, "a"), half(turns, log, "b")) == (3.0, 3.0)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("behind", [0, 1, 3])
def test_the_failure_of_one_half_ends_both(failing: int, behind: int) -> None:
    """behind: so many collectives; at the end the other half may be through."""
    turns, log = Turns(LateLane()), list[str]()

    def fails() -> float:
        half(turns, log, "x", behind)()
        raise ConnectionError("a rank is gone")

    halves = [half(turns, log, "a"), half(turns, log, "a")]
    halves[failing] = fails
    with pytest.raises(ConnectionError, match="a rank is gone"):
        turns.run(*halves)
    assert not turns.under_way
    assert turns.run(half(turns, log, "a"), half(turns, log, "b")) == (3.0, 3.0)


def test_a_collective_that_fails_ends_both() -> None:
    turns = Turns(LateLane())

    def fails() -> torch.Tensor:
        raise ConnectionError("a rank is gone")

    with pytest.raises(ConnectionError, match="a rank is gone"):
        turns.run(lambda: turns.travel("sum", fails), lambda: turns.travel("sum", lambda: torch.zeros(1)))


def test_a_half_computes_without_gradients() -> None:
    turns = Turns(LateLane())
    with torch.inference_mode():
        assert turns.run(torch.is_inference_mode_enabled, torch.is_inference_mode_enabled) == (True, True)
