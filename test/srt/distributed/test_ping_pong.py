"""Two halves that alternate: their order, their collectives' results, and what one's failure does to the other."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from sglang.srt.distributed.groups import Group
from sglang.srt.distributed.ping_pong import Blocks, CpuSideStream, MicrobatchesDiffer, PingPong
from sglang.srt.distributed.quantized_sums import QuantizedSums


def microbatch(ping_pong: PingPong, log: list[str], name: str, count: int = 3) -> Callable[[], float]:
    """Adds 1 to what travels, `count` times, and logs when it computes, sends and receives."""

    def run() -> float:
        x = torch.zeros(1)
        for i in range(count):
            log.append(f"{name}{i}")

            def collective(x: torch.Tensor = x, i: int = i) -> torch.Tensor:
                log.append(f"~{name}{i}")
                return x.add_(1)

            x = ping_pong.run_collective(("sum", i), collective)
        return float(x)

    return run


def test_halves_alternate_and_collectives_arrive_late_in_the_order_in_which_they_were_sent() -> None:
    ping_pong, log = PingPong(CpuSideStream()), list[str]()
    for _ in range(2):  # nothing is left of the first run
        log.clear()
        assert ping_pong.run(microbatch(ping_pong, log, "a"), microbatch(ping_pong, log, "b")) == (3.0, 3.0)
        assert not ping_pong.active
        assert log == ["a0", "b0", "~a0", "a1", "~b0", "b1", "~a1", "a2", "~b1", "b2", "~a2", "~b2"]


def test_halves_without_collectives_run_one_after_the_other() -> None:
    ping_pong, log = PingPong(CpuSideStream()), list[str]()
    assert ping_pong.run(microbatch(ping_pong, log, "a", 0), microbatch(ping_pong, log, "b", 0)) == (0.0, 0.0)


def blocks(ping_pong: PingPong, log: list[str], name: str, count: int = 3, inside: int = -1) -> Blocks[float]:
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
            ping_pong.run_collective(("norm", i), lambda i=i: log.append(f"!{name}{i}") or torch.zeros(1))
        receive = ping_pong.start_collective(("sum", i), collective)
        yield
    return float(x if receive is None else receive())


def silent(count: int) -> Blocks[int]:
    """Blocks that leave no sums."""
    for _ in range(count):
        yield
    return count


def test_microbatches_of_unequal_numbers_of_blocks_are_refused() -> None:
    ping_pong = PingPong(CpuSideStream())
    assert ping_pong.run_blocks(silent(2), silent(2)) == (2, 2)
    with pytest.raises(MicrobatchesDiffer, match="microbatch 0 has fewer blocks"):
        ping_pong.run_blocks(silent(1), silent(3))


def test_blocks_alternate_and_their_sums_arrive_before_the_next_block() -> None:
    ping_pong, log = PingPong(CpuSideStream()), list[str]()
    for _ in range(2):  # nothing is left of the first run
        log.clear()
        assert ping_pong.run_blocks(blocks(ping_pong, log, "a"), blocks(ping_pong, log, "b")) == (3.0, 3.0)
        assert not ping_pong.active and not ping_pong.by_block
        assert log == ["a0", "b0", "~a0", "a1", "~b0", "b1", "~a1", "a2", "~b1", "b2", "~a2", "~b2"]


def test_what_a_block_asks_for_itself_arrives_behind_what_was_sent_before() -> None:
    ping_pong, log = PingPong(CpuSideStream()), list[str]()
    assert ping_pong.run_blocks(blocks(ping_pong, log, "a", 2, 1), blocks(ping_pong, log, "b", 2, 1)) == (2.0, 2.0)
    assert log == ["a0", "b0", "~a0", "a1", "~b0", "!a1", "b1", "~a1", "!b1", "~b1"]


def test_blocks_that_exchange_other_things_are_refused() -> None:
    ping_pong, log = PingPong(CpuSideStream()), list[str]()
    with pytest.raises(MicrobatchesDiffer, match="second"):
        ping_pong.run_blocks(blocks(ping_pong, log, "a"), blocks(ping_pong, log, "b", inside=0))
    with pytest.raises(MicrobatchesDiffer, match="sent 0 collectives, the first one 3"):
        ping_pong.run_blocks(blocks(ping_pong, log, "a"), silent(3))
    assert ping_pong.run(microbatch(ping_pong, log, "a"), microbatch(ping_pong, log, "b")) == (3.0, 3.0)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_block_that_fails_ends_both_halves(failing: int) -> None:
    ping_pong, log, closed = PingPong(CpuSideStream()), list[str](), list[bool]()

    def fails() -> Blocks[float]:
        ping_pong.start_collective(("sum", 0), lambda: torch.zeros(1))
        yield
        raise ConnectionError("a rank is gone")

    def continues() -> Blocks[float]:
        try:
            return (yield from blocks(ping_pong, log, "x", 5))
        finally:
            closed.append(True)

    microbatches = [continues(), continues()]
    microbatches[failing] = fails()
    with pytest.raises(ConnectionError, match="a rank is gone"):
        ping_pong.run_blocks(*microbatches)
    assert closed and not ping_pong.active and not ping_pong.by_block
    assert ping_pong.run_blocks(blocks(ping_pong, log, "a"), blocks(ping_pong, log, "b")) == (3.0, 3.0)


@pytest.mark.parametrize(
    ("counts", "what"), [((1, 2), "second"), ((0, 1), "second"), ((2, 0), "sent 0"), ((3, 2), "sent 2")]
)
def test_a_second_half_that_would_overtake_is_refused(counts: tuple[int, int], what: str) -> None:
    ping_pong, log = PingPong(CpuSideStream()), list[str]()
    with pytest.raises(MicrobatchesDiffer, match=what):
        ping_pong.run(microbatch(ping_pong, log, "a", counts[0]), microbatch(ping_pong, log, "b", counts[1]))
    assert ping_pong.run(microbatch(ping_pong, log, "a"), microbatch(ping_pong, log, "b")) == (3.0, 3.0)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("behind", [0, 1, 3])
def test_the_failure_of_one_half_ends_both(failing: int, behind: int) -> None:
    """behind: so many collectives; at the end the other half may be through."""
    ping_pong, log = PingPong(CpuSideStream()), list[str]()

    def fails() -> float:
        microbatch(ping_pong, log, "x", behind)()
        raise ConnectionError("a rank is gone")

    microbatches = [microbatch(ping_pong, log, "a"), microbatch(ping_pong, log, "a")]
    microbatches[failing] = fails
    with pytest.raises(ConnectionError, match="a rank is gone"):
        ping_pong.run(*microbatches)
    assert not ping_pong.active
    assert ping_pong.run(microbatch(ping_pong, log, "a"), microbatch(ping_pong, log, "b")) == (3.0, 3.0)


def test_a_collective_that_fails_ends_both() -> None:
    ping_pong = PingPong(CpuSideStream())

    def fails() -> torch.Tensor:
        raise ConnectionError("a rank is gone")

    with pytest.raises(ConnectionError, match="a rank is gone"):
        ping_pong.run(
            lambda: ping_pong.run_collective("sum", fails),
            lambda: ping_pong.run_collective("sum", lambda: torch.zeros(1)),
        )


def test_a_half_computes_without_gradients() -> None:
    ping_pong = PingPong(CpuSideStream())
    with torch.inference_mode():
        assert ping_pong.run(torch.is_inference_mode_enabled, torch.is_inference_mode_enabled) == (True, True)


@pytest.mark.parametrize("exact", [False, True])
def test_sums_of_halves_stay_exact_where_they_are_hidden_anyway(exact: bool) -> None:
    """Between halves alone: a whole step's are quantized as the group says."""
    group, ping_pong = Group(0, 2), PingPong(CpuSideStream())
    ping_pong.exact = exact
    group.alternate_in(ping_pong)
    sums = SimpleNamespace(covers=lambda x: True, all_reduce=lambda x: x + 8, all_gather=lambda x: x + 80)
    group.quantize_with(cast(QuantizedSums, sums))
    group.library_all_reduce = lambda x: x + 1  # type: ignore[method-assign]
    x = torch.zeros(2, 32)
    seen = ping_pong.run(*(lambda: float(group.all_reduce(x)[0, 0]) for _ in range(2)))
    assert seen == ((1.0, 1.0) if exact else (8.0, 8.0))
    assert float(group.all_reduce(x)[0, 0]) == 8.0
