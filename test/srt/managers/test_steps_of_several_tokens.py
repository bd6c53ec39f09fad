"""Steps that verify draft tokens give every request the tokens of steps of one token, whatever is drafted, aborted,
retracted or cached on the way, and however many steps are in flight."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.wire.io_struct import AbortReq
from srt.managers.drafting_runner import DraftingRunner
from srt.managers.fake_runner import (
    EOS,
    Collector,
    add,
    assert_clean,
    expected_output,
    make_scheduler,
    request,
    run_to_end,
)
from srt.managers.test_scheduler import prompt, workload


def scheduler_with(runner: DraftingRunner, steps_in_flight: int = 1, **options: object) -> Scheduler:
    scheduler = make_scheduler(runner, **options)
    scheduler.steps_in_flight = steps_in_flight
    return scheduler


def assert_cached_entries_are_right(scheduler: Scheduler) -> None:
    """What the tree says of a cache slot is what lies there."""
    for node in scheduler.kv.tree.nodes():
        np.testing.assert_array_equal(scheduler.runner.kv[node.value], node.key)


@pytest.mark.parametrize("steps_in_flight", [0, 1, 3])
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("error_rate", [0.0, 0.4, 1.0])
def test_the_tokens_are_those_of_single_steps(error_rate: float, page: int, steps_in_flight: int) -> None:
    runner = DraftingRunner(2048, page, 256, 8, 64, tokens_per_step=4, error_rate=error_rate, lookahead_slots=3)
    scheduler = scheduler_with(runner, steps_in_flight)
    collector = Collector()
    for i in range(20):
        add(scheduler, request(f"r{i}", prompt(5 + 7 * i, i), 3 + 3 * i, stream=i % 2 == 0))
        scheduler.reqs[f"r{i}"].set_mask_ms(6 * (i % 3 == 0))  # as if their grammars were slow: they take turns
    run_to_end(scheduler, collector)
    for i in range(20):
        assert collector.tokens[f"r{i}"] == expected_output(prompt(5 + 7 * i, i), 3 + 3 * i)
    assert_clean(scheduler)
    assert_cached_entries_are_right(scheduler)


@pytest.mark.parametrize("steps_in_flight", [0, 1, 2])
def test_right_draft_tokens_take_fewer_steps(steps_in_flight: int) -> None:
    """40 tokens: one from the prompt, 39 in steps of four; wrong draft tokens bring one a step. The last steps have no
    place for draft tokens: those under way might fill it."""
    for error_rate, num_steps, num_guessing in ((0.0, 10, 10), (1.0, 39, 38 - steps_in_flight)):
        runner = DraftingRunner(512, 1, 256, 4, 64, tokens_per_step=4, error_rate=error_rate)
        scheduler = scheduler_with(runner, steps_in_flight)
        add(scheduler, request("a", prompt(5), 40, ignore_eos=True))
        req = scheduler.reqs["a"]
        run_to_end(scheduler, Collector())
        assert runner.steps == ["extend"] + ["verify"] * num_steps
        assert req.drafts.steps == num_guessing and runner.num_accepted == 39


def test_a_message_tells_how_many_steps_verified() -> None:
    scheduler = scheduler_with(DraftingRunner(512, 1, 256, 4, 64, tokens_per_step=4))
    add(scheduler, request("a", prompt(5), 40, ignore_eos=True))
    metas = []
    while not scheduler.idle:
        scheduler.step()
        metas += [meta for message in scheduler.outbox for meta in message.meta]
        scheduler.outbox.clear()
    assert metas[-1].completion_tokens == 40 and metas[-1].drafts.steps == 10


def test_slots_of_rejected_draft_tokens_are_used_next() -> None:
    """A request holds cache slots for its tokens and for what is in flight, not for every draft token that fell
    away."""
    runner = DraftingRunner(512, 1, 256, 4, 64, tokens_per_step=4, error_rate=1.0)
    scheduler = scheduler_with(runner)
    add(scheduler, request("a", prompt(5), 100, ignore_eos=True))
    req = scheduler.reqs["a"]
    while not scheduler.idle:
        scheduler.step()
        if req.slot:
            assert scheduler.check_memory()["held"] + req.num_cached <= len(req.tokens) + 2 * 4
        memory = scheduler.check_memory()
        assert memory["free"] + memory["cached"] + memory["held"] == memory["total"]
    assert_clean(scheduler)


def test_a_stop_token_among_accepted_ones_ends_there() -> None:
    prompts = [prompt(9, i) for i in range(90)]
    ids = next(ids for ids in prompts if 4 < len(expected_output(ids, 30)) < 25)
    runner = DraftingRunner(512, 1, 256, 4, 64, tokens_per_step=8)
    scheduler, collector = scheduler_with(runner), Collector()
    add(scheduler, request("a", ids, 30))
    run_to_end(scheduler, collector)
    assert collector.tokens["a"] == expected_output(ids, 30) and collector.finish["a"].matched == EOS
    assert_clean(scheduler)
    assert_cached_entries_are_right(scheduler)


def test_hidden_states_take_no_draft_tokens() -> None:
    runner = DraftingRunner(512, 1, 256, 4, 64, tokens_per_step=4)
    runner.plan.description = SimpleNamespace(hidden_size=8)
    scheduler, collector = scheduler_with(runner), Collector()
    with_states = request("a", prompt(5), 20, ignore_eos=True)
    with_states.hidden_start = 0
    add(scheduler, with_states)
    add(scheduler, request("b", prompt(6, 2), 20, ignore_eos=True, presence_penalty=0.5))
    widths: dict[int, set[int]] = {}
    original = runner.forward

    def forward(step):
        if step.widths is not None:
            for slot, width in zip(step.slots.tolist(), step.widths.tolist(), strict=True):
                widths.setdefault(slot, set()).add(width)
        return original(step)

    runner.forward = forward
    slots = {}
    while not scheduler.idle:
        scheduler.step()
        slots |= {rid: req.slot for rid, req in scheduler.reqs.items() if req.slot}
        collector.take(scheduler)
    assert widths[slots["a"]] == {1} and 4 in widths[slots["b"]]


def test_logits_that_are_not_numbers_behind_accepted_draft_tokens() -> None:
    ids = prompt(10)
    runner = DraftingRunner(512, 1, 256, 4, 64, tokens_per_step=4)
    runner.not_numbers = lambda tokens: len(tokens) == len(ids) + 7
    scheduler, collector = scheduler_with(runner), Collector()
    add(scheduler, request("a", ids, 20, ignore_eos=True))
    run_to_end(scheduler, collector)
    assert collector.finish["a"].status_code == 500
    assert collector.tokens["a"] == expected_output(ids, 20, ignore_eos=True)[:7]
    assert_clean(scheduler)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    events=workload,
    page=st.sampled_from([1, 4, 16]),
    pool_pages=st.integers(12, 60),
    chunk=st.sampled_from([-1, 16, 48]),
    max_reqs=st.integers(1, 6),
    radix=st.booleans(),
    steps_in_flight=st.integers(0, 3),
    tokens_per_step=st.integers(1, 6),
    error_rate=st.sampled_from([0.0, 0.3, 1.0]),
    conservativeness=st.sampled_from([0.01, 1.0]),
)
def test_any_workload(
    events: list, page: int, pool_pages: int, chunk: int, max_reqs: int, radix: bool, steps_in_flight: int,
    tokens_per_step: int, error_rate: float, conservativeness: float,
) -> None:  # fmt: skip
    if tokens_per_step == 1:
        tokens_per_step = 2
    runner = DraftingRunner(
        pool_pages * page if page > 1 else pool_pages * 4, page, 160, max_reqs, chunk,
        tokens_per_step=tokens_per_step, error_rate=error_rate, lookahead_slots=tokens_per_step - 1,
    )  # fmt: skip
    scheduler = scheduler_with(
        runner, steps_in_flight, disable_radix_cache=not radix, schedule_conservativeness=conservativeness
    )
    collector = Collector()
    wanted: dict[str, tuple[list[int], int, bool]] = {}
    for i, (family, length, max_new, steps, kind, ignore_eos) in enumerate(events):
        ids = prompt(length, family)
        add(scheduler, request(f"r{i}", ids, max_new, stream=i % 2 == 0, ignore_eos=ignore_eos))
        wanted[f"r{i}"] = (ids, max_new, ignore_eos)
        for _ in range(steps):
            scheduler.step()
            scheduler.kv.check()
            collector.take(scheduler)
        if kind == "abort":
            scheduler.abort(AbortReq([f"r{i // 2}"]))
    run_to_end(scheduler, collector)
    assert set(collector.finish) == set(wanted)
    capacity = min(160, scheduler.kv.size - 2 * page) - (tokens_per_step - 1)
    for rid, (ids, max_new, ignore_eos) in wanted.items():
        got, finish = collector.tokens[rid], collector.finish[rid]
        full = expected_output(ids, max(0, min(max_new, capacity - len(ids))), ignore_eos)
        if finish.type == "abort":
            assert got == full[: len(got)]
        else:
            assert got == full
            assert (finish.type == "stop") == (bool(full) and full[-1] == EOS and not ignore_eos)
    assert_clean(scheduler)
    assert_cached_entries_are_right(scheduler)
