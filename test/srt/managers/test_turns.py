"""Running requests take turns where a step passes several stages: while one step is on its way, others bring the tokens
of other requests."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.model_executor.step import StepInput
from srt.managers.fake_runner import (
    Collector,
    FakeRunner,
    LateResult,
    add,
    assert_clean,
    expected_output,
    make_scheduler,
    request,
    run_to_end,
)
from srt.managers.test_scheduler import prompt


class WatchedRunner(FakeRunner):
    """Remembers the requests whose last token each step brings."""

    def __init__(self, pool: int = 4096, chunk: int = 512) -> None:
        super().__init__(pool, 1, 256, 32, chunk)
        self.brought: list[set[int]] = []

    def forward(self, step: StepInput) -> LateResult:
        count = step.num_decodes
        self.brought.append(set(step.slots[:count].tolist()))
        return super().forward(step)


def scheduler_of(stages: int, **options: object) -> tuple[Scheduler, WatchedRunner]:
    runner = WatchedRunner()
    return make_scheduler(runner, pp_size=stages, **options), runner


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_steps_on_their_way_are_of_different_requests(stages: int) -> None:
    scheduler, runner = scheduler_of(stages)
    for i in range(9):
        add(scheduler, request(f"r{i}", prompt(5 + i, i), 20, ignore_eos=True))
    collector = Collector()
    run_to_end(scheduler, collector)
    assert all(collector.tokens[f"r{i}"] == expected_output(prompt(5 + i, i), 20, True) for i in range(9))
    decoding = runner.brought[1 : 1 + 18 * stages]
    for at in range(len(decoding) - stages + 1):
        round_ = decoding[at : at + stages]
        assert sum(map(len, round_)) == len(set.union(*round_)) == 9, "each request once a round"
        assert max(map(len, round_)) - min(map(len, round_)) <= 1, "as many in every step"
    assert_clean(scheduler)


def test_chunks_of_a_prompt_follow_each_other_without_waiting() -> None:
    """They need no token of the step before, so that every stage computes one of them."""
    runner = WatchedRunner(chunk=16)
    scheduler = make_scheduler(runner, pp_size=3)
    add(scheduler, request("long", prompt(100), 2, ignore_eos=True))
    for _ in range(3):
        scheduler.step()
    assert len(runner.steps) == len(scheduler.in_flight) == 3


def test_prompts_in_small_chunks_let_every_turn_decode() -> None:
    runner = WatchedRunner(chunk=2)
    scheduler = make_scheduler(runner, pp_size=2)
    collector = Collector()
    for i in range(4):
        add(scheduler, request(f"r{i}", prompt(2, i), 200, ignore_eos=True))
    while scheduler.waiting or scheduler.chunked:
        scheduler.step()
    decoding = {req.slot for req in scheduler.running.reqs}
    add(scheduler, request("long", prompt(60), 2, ignore_eos=True))
    while not scheduler.chunked:
        scheduler.step()
    first = len(runner.brought)
    while scheduler.chunked:
        scheduler.step()
    times = [sum(slot in slots for slots in runner.brought[first:]) for slot in decoding]
    assert len(decoding) == 4 and min(times) > 10 and max(times) - min(times) <= 2
    run_to_end(scheduler, collector)
    assert_clean(scheduler)


def test_one_request_has_every_turn() -> None:
    scheduler, runner = scheduler_of(3)
    add(scheduler, request("a", prompt(5), 6, ignore_eos=True))
    run_to_end(scheduler, Collector())
    assert runner.steps == ["extend"] + ["decode"] * 5 and all(len(slots) == 1 for slots in runner.brought[1:])


def test_no_turn_stays_empty_while_another_has_several() -> None:
    """Two requests end together, which were all of a turn."""
    scheduler, runner = scheduler_of(2)
    for i in range(4):
        add(scheduler, request(f"r{i}", prompt(5, i), 4 if i % 2 else 20, ignore_eos=True))
    scheduler.step()
    assert {req.microbatch for req in scheduler.running.reqs if req.limit == 5 + 4} == {1}
    run_to_end(scheduler, Collector())
    assert [len(slots) for slots in runner.brought[-8:]] == [1] * 8
    assert all(runner.brought[-i] != runner.brought[-i - 1] for i in range(1, 8))


def test_without_overlap_one_step_is_on_its_way() -> None:
    scheduler, runner = scheduler_of(2, disable_overlap_schedule=True)
    for i in range(3):
        add(scheduler, request(f"r{i}", prompt(5, i), 4, ignore_eos=True))
    for _ in range(3):
        scheduler.step()
        assert not scheduler.in_flight
    assert [len(slots) for slots in runner.brought] == [0, 3, 3]


def test_a_mask_waits_for_its_own_requests_only() -> None:
    """The steps of other turns stay on their way."""
    scheduler, _ = scheduler_of(3)
    for i in range(3):
        add(scheduler, request(f"r{i}", prompt(5, i), 20, ignore_eos=True))
    for _ in range(4):
        scheduler.step()
    masked = scheduler.running.microbatch_reqs[0]
    filled: list[int] = []
    masked.grammar = SimpleNamespace(  # type: ignore[assignment]
        fill_mask=lambda row: filled.append(len(masked.tokens)), accept=lambda token: True,
        is_terminated=lambda: False, allowance=SimpleNamespace(exhausted=False),
    )  # fmt: skip
    masked.begin()
    known = masked.planned_len
    batch = scheduler.pick()
    assert batch is not None and masked in batch.sampled
    scheduler.launch(batch)
    assert filled == [known], "every token before it is there"
    assert len(scheduler.in_flight) == 3, "with two steps of the others"
    run_to_end(scheduler, Collector())
    assert_clean(scheduler)
