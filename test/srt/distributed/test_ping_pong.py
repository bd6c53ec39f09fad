"""Two halves that alternate: their order, their collectives' results, and what one's failure does to the other."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from sglang.srt.distributed.parallel_state import Group
from sglang.srt.distributed.ping_pong import Blocks, LateLane, MicrobatchesDiffer, PingPong
from sglang.srt.distributed.quantized_sums import QuantizedSums


def microbatch(turns: PingPong, log: list[str], name: str, count: int = 3) -> Callable[[], float]:
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
    turns, log = PingPong(LateLane()), list[str]()
    for _ in range(2):  # nothing is left of the first run
        log.clear()
        assert turns.run(microbatch(turns, log, "a"), microbatch(turns, log, "b")) == (3.0, 3.0)
        assert not turns.active
        assert log == ["a0", "b0", "~a0", "a1", "~b0", "b1", "~a1", "a2", "~b1", "b2", "~a2", "~b2"]


def test_halves_without_collectives_run_one_after_the_other() -> None:
    turns, log = PingPong(LateLane()), list[str]()
    assert turns.run(microbatch(turns, log, "a", 0), microbatch(turns, log, "b", 0)) == (0.0, 0.0)


def blocks(turns: PingPong, log: list[str], name: str, count: int = 3, inside: int = -1) -> Blocks[float]:
    """As `microbatch`, a block at a time, whose sums travel until the next block. inside: the block that waits for a
    collective of its own."""
    x, receive = torch.zeros(1), None
    for i in range(count):
        x = x if receive is None else receive()
        log.append(f"{name}{i}")

        def collective(x: torch.Tensor = x, i: int = i) -> torch.Tensor:
            log.append(f"~{name}{i}")
            return x.add_(1)

        if i == inside:
            turns.travel(("norm", i), lambda i=i: log.append(f"!{name}{i}") or torch.zeros(1))
        receive = turns.start(("sum", i), collective)
        yield
    return float(x if receive is None else receive())


def silent(count: int) -> Blocks[int]:
    """Blocks that leave no sums."""
    for _ in range(count):
        yield
    return count


def test_microbatches_of_unequal_numbers_of_blocks_are_refused() -> None:
    turns = PingPong(LateLane())
    assert turns.run_blocks(silent(2), silent(2)) == (2, 2)
    with pytest.raises(MicrobatchesDiffer, match="microbatch 0 has fewer blocks"):
        turns.run_blocks(silent(1), silent(3))


def test_blocks_alternate_and_their_sums_arrive_before_the_next_block() -> None:
    turns, log = PingPong(LateLane()), list[str]()
    for _ in range(2):  # nothing is left of the first run
        log.clear()
        assert turns.run_blocks(blocks(turns, log, "a"), blocks(turns, log, "b")) == (3.0, 3.0)
        assert not turns.active and not turns.by_block
        assert log == ["a0", "b0", "~a0", "a1", "~b0", "b1", "~a1", "a2", "~b1", "b2", "~a2", "~b2"]


def test_what_a_block_asks_for_itself_arrives_behind_what_was_sent_before() -> None:
    turns, log = PingPong(LateLane()), list[str]()
    assert turns.run_blocks(blocks(turns, log, "a", 2, 1), blocks(turns, log, "b", 2, 1)) == (2.0, 2.0)
    assert log == ["a0", "b0", "~a0", "a1", "~b0", "!a1", "b1", "~a1", "!b1", "~b1"]


def test_blocks_that_exchange_other_things_are_refused() -> None:
    turns, log = PingPong(LateLane()), list[str]()
    with pytest.raises(MicrobatchesDiffer, match="second"):
        turns.run_blocks(blocks(turns, log, "a"), blocks(turns, log, "b", inside=0))
    with pytest.raises(MicrobatchesDiffer, match="sent 0 collectives, the first one 3"):
        turns.run_blocks(blocks(turns, log, "a"), silent(3))
    assert turns.run(microbatch(turns, log, "a"), microbatch(turns, log, "b")) == (3.0, 3.0)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_block_that_fails_ends_both_halves(failing: int) -> None:
    turns, log, closed = PingPong(LateLane()), list[str](), list[bool]()

    def fails() -> Blocks[float]:
        turns.start(("sum", 0), lambda: torch.zeros(1))
        yield
        raise ConnectionError("a rank is gone")

    def goes_on() -> Blocks[float]:
        try:
            return (yield from blocks(turns, log, "x", 5))
        finally:
            closed.append(True)

    microbatches = [goes_on(), goes_on()]
    microbatches[failing] = fails()
    with pytest.raises(ConnectionError, match="a rank is gone"):
        turns.run_blocks(*microbatches)
    assert closed and not turns.active and not turns.by_block
    assert turns.run_blocks(blocks(turns, log, "a"), blocks(turns, log, "b")) == (3.0, 3.0)


@pytest.mark.parametrize(
    ("counts", "what"), [((1, 2), "second"), ((0, 1), "second"), ((2, 0), "sent 0"), ((3, 2), "sent 2")]
)
def test_a_second_half_that_would_overtake_is_refused(counts: tuple[int, int], what: str) -> None:
    turns, log = PingPong(LateLane()), list[str]()
    with pytest.raises(MicrobatchesDiffer, match=what):
        turns.run(microbatch(turns, log, "a", counts[0]), microbatch(turns, log, "b", counts[1]))
    assert turns.run(microbatch(turns, log, "a"), microbatch(turns, log, "b")) == (3.0, 3.0)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("behind", [0, 1, 3])
def test_the_failure_of_one_half_ends_both(failing: int, behind: int) -> None:
    """behind: so many collectives; at the end the other half may be through."""
    turns, log = PingPong(LateLane()), list[str]()

    def fails() -> float:
        microbatch(turns, log, "x", behind)()
        raise ConnectionError("a rank is gone")

    microbatches = [microbatch(turns, log, "a"), microbatch(turns, log, "a")]
    microbatches[failing] = fails
    with pytest.raises(ConnectionError, match="a rank is gone"):
        turns.run(*microbatches)
    assert not turns.active
    assert turns.run(microbatch(turns, log, "a"), microbatch(turns, log, "b")) == (3.0, 3.0)


def test_a_collective_that_fails_ends_both() -> None:
    turns = PingPong(LateLane())

    def fails() -> torch.Tensor:
        raise ConnectionError("a rank is gone")

    with pytest.raises(ConnectionError, match="a rank is gone"):
        turns.run(lambda: turns.travel("sum", fails), lambda: turns.travel("sum", lambda: torch.zeros(1)))


def test_a_half_computes_without_gradients() -> None:
    turns = PingPong(LateLane())
    with torch.inference_mode():
        assert turns.run(torch.is_inference_mode_enabled, torch.is_inference_mode_enabled) == (True, True)


@pytest.mark.parametrize("exact", [False, True])
def test_sums_of_halves_stay_exact_where_they_are_hidden_anyway(exact: bool) -> None:
    """Between halves alone: a whole step's are quantized as the group says."""
    group, turns = Group(0, 2), PingPong(LateLane())
    turns.exact = exact
    group.alternate_in(turns)
    sums = SimpleNamespace(covers=lambda x: True, all_reduce=lambda x: x + 8, all_gather=lambda x: x + 80)
    group.quantize_with(cast(QuantizedSums, sums))
    group.library_all_reduce = lambda x: x + 1  # type: ignore[method-assign]
    x = torch.zeros(2, 32)
    seen = turns.run(*(lambda: float(group.all_reduce(x)[0, 0]) for _ in range(2)))
    assert seen == ((1.0, 1.0) if exact else (8.0, 8.0))
    assert float(group.all_reduce(x)[0, 0]) == 8.0
