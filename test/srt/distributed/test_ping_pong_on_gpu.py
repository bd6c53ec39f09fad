"""The lane of a GPU: what travels there is whole when it arrives, whatever memory is reused meanwhile."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.distributed.ping_pong import Blocks, Collective, CudaSideStream, PingPong

pytestmark = pytest.mark.gpu
ROUNDS, BLOCKS, ROWS, COLUMNS = 20, 12, 512, 4096
CYCLES = 2_000_000
"""That each collective waits before it begins: about a millisecond, longer than what is computed beside it."""


def _half(ping_pong: PingPong, seed: float, in_place: bool) -> torch.Tensor:
    x = torch.full((ROWS, COLUMNS), seed, device="cuda")
    for block in range(BLOCKS):
        out = x * 0.5 + block

        def collective(out: torch.Tensor = out) -> torch.Tensor:
            torch.cuda._sleep(CYCLES)
            return out.mul_(2.0) if in_place else out * 2.0

        total = ping_pong.run_collective(("sum", block), collective)
        del out
        x = x + total
        del total
        torch.full_like(x, float("nan"))  # into memory that is free by now
    return x


def _blocks(ping_pong: PingPong, seed: float, in_place: bool) -> Blocks[torch.Tensor]:
    """As `_half`, a block at a time: its sum travels until the next one."""
    x = torch.full((ROWS, COLUMNS), seed, device="cuda")
    receive: Collective | None = None
    for block in range(BLOCKS):
        x = x if receive is None else x + receive()
        out = x * 0.5 + block

        def collective(out: torch.Tensor = out) -> torch.Tensor:
            torch.cuda._sleep(CYCLES)
            return out.mul_(2.0) if in_place else out * 2.0

        receive = ping_pong.start_collective(("sum", block), collective)
        del out, collective
        torch.full_like(x, float("nan"))  # into memory that is free by now
        yield
    assert receive is not None
    return x + receive()


def _wanted(seed: float) -> float:
    x = seed
    for block in range(BLOCKS):
        x += 2.0 * (x * 0.5 + block)
    return x


@pytest.mark.parametrize("by_block", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_results_of_both_halves_are_whole(in_place: bool, by_block: bool) -> None:
    ping_pong = PingPong(CudaSideStream("cuda"))
    with torch.inference_mode():
        for number in range(ROUNDS):
            seeds = float(number), float(number) + 0.5
            if by_block:
                microbatches = ping_pong.run_blocks(*(_blocks(ping_pong, seed, in_place) for seed in seeds))
            else:
                microbatches = ping_pong.run(*(lambda seed=seed: _half(ping_pong, seed, in_place) for seed in seeds))  # type: ignore[misc]
            for seed, microbatch in zip(seeds, microbatches, strict=True):
                assert bool((microbatch == _wanted(seed)).all()), (number, seed)


def test_what_is_computed_does_not_wait_for_the_other_halfs_collective() -> None:
    """By order of events, not by time: the second half's first stretch ends before the first half's collective."""
    ping_pong, events = PingPong(CudaSideStream("cuda")), {}

    def microbatch(name: str) -> torch.Tensor:
        x = torch.ones(1, device="cuda") + 1
        events[name] = torch.cuda.Event(enable_timing=True)
        events[name].record()

        def collective() -> torch.Tensor:
            torch.cuda._sleep(50 * CYCLES)
            events[f"{name} sent"] = torch.cuda.Event(enable_timing=True)
            events[f"{name} sent"].record()
            return x

        return ping_pong.run_collective("sum", collective)

    with torch.inference_mode():
        ping_pong.run(lambda: microbatch("first"), lambda: microbatch("second"))
    torch.cuda.synchronize()
    assert events["second"].elapsed_time(events["first sent"]) > 0
