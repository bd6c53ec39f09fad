"""Work of the host in one step where much waits, runs and is cached: it is bounded, whatever the policy. Calls are
counted; benchmark/host/bench_full_queue.py has times."""

from __future__ import annotations

import gc
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang.srt.managers.scheduler import queue_order
from sglang.srt.managers.scheduler.attention_groups import AttentionGroups
from sglang.srt.managers.scheduler.media_steps import MediaSteps
from sglang.srt.managers.scheduler.prompt_choice import MAX_EXAMINED, SHARED_PREFIX
from sglang.srt.managers.scheduler.queue_order import MAX_MATCHED, POLICIES
from sglang.srt.managers.scheduler.schedule_batch import _leading
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.stop_tokens import StopTokens
from sglang.srt.managers.scheduler.waiting_queue import WaitingQueue
from sglang.srt.mem_cache.allocator import TokenAllocator
from sglang.srt.mem_cache.kv_table import KVTable
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.model_executor.step import StepInput
from sglang.srt.sampling.sampling_params import NO_TOKEN
from srt.managers.drafting_runner import DraftingRunner
from srt.managers.fake_runner import (
    EOS,
    VOCAB,
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
from srt.mem_cache.test_radix_cache import matched


def full_scheduler(policy: str, num_waiting: int, shared: bool = False, **flags: bool) -> Scheduler:
    """One request runs and takes all memory; the others wait. shared: they begin alike, and there is room."""
    scheduler = make_scheduler(FakeRunner(4096 if shared else 400, 1, 512, 8, 256), schedule_policy=policy, **flags)
    add(scheduler, request("runs", [1, 2, 3], 380, ignore_eos=True))
    scheduler.step()
    for number in range(num_waiting):
        ids = [*range(10, 10 + SHARED_PREFIX), number] if shared else [number % 90 + 5] * 20
        add(scheduler, request(f"waits {number}", ids, 4 + number % 3, ignore_eos=True))
    return scheduler


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_matches_few_of_those_that_wait(policy: str, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, calls, match = full_scheduler(policy, 1000, shared), Counter[str](), KVTable.match

    def counted(self: KVTable, req: Any) -> Any:
        calls["match"] += 1
        return match(self, req)

    monkeypatch.setattr(KVTable, "match", counted)
    for _ in range(3):
        calls.clear()
        scheduler.step()
        assert calls["match"] <= MAX_MATCHED + MAX_EXAMINED
    assert len(scheduler.waiting) >= 900


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_all(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those behind the ones that it orders, and those that a step does not look at."""
    monkeypatch.setattr(queue_order, "MAX_ORDERED", 5)
    monkeypatch.setattr("sglang.srt.managers.scheduler.prompt_choice.MAX_EXAMINED", 3)
    scheduler, collector = full_scheduler(policy, 40, shared=True), Collector()
    order = [req.rid for req in scheduler.choice.queue()]
    assert sorted(order) == sorted(req.rid for req in scheduler.waiting)
    if policy == "random":
        assert order[5:] == [f"waits {number}" for number in range(5, 40)]
    run_to_end(scheduler, collector)
    assert len(collector.finish) == 41
    assert_clean(scheduler)


def test_tokens_that_are_held_are_counted_as_they_come() -> None:
    scheduler, collector = make_scheduler(FakeRunner(300, 1, 128, 4, 32)), Collector()
    for number in range(20):
        add(scheduler, request(f"r{number}", [number + 3] * (number % 7 + 1), 20))
    for _ in range(20_000):
        scheduler.step()
        collector.take(scheduler)
        assert scheduler.held_tokens == sum(len(req.tokens) for req in scheduler.reqs.values())
        if scheduler.idle:
            break
    assert scheduler.idle and scheduler.held_tokens == 0


def test_the_choice_of_a_group_looks_at_no_request() -> None:
    class Opaque(dict[str, Any]):
        def values(self) -> Any:
            raise AssertionError("the sum over all requests")

    groups = AttentionGroups.__new__(AttentionGroups)
    scheduler = make_scheduler(FakeRunner(300, 1, 128, 4, 32))
    add(scheduler, request("r", [3, 4, 5], 20))
    scheduler.reqs = Opaque(scheduler.reqs)
    groups.schedulers = [scheduler, scheduler]
    assert [(load.index, load.num_requests, load.num_tokens) for load in groups.loads()] == [(0, 1, 3), (1, 1, 3)]


def test_keeping_beyond_half_of_the_pool_walks_no_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = RadixCache(TokenAllocator(1000, 1), 1)
    nodes = []
    for number in range(200):
        ids = np.array([number, number, 1])
        slots = cache.allocator.alloc([0], [3], None)
        nodes.append(cache.commit(ids, slots, cache.root, 0).node)
        cache.unlock(nodes[-1])
    with monkeypatch.context() as patch:
        patch.setattr(RadixCache, "nodes", lambda self: (_ for _ in ()).throw(AssertionError("the whole tree")))
        for until, node in enumerate(nodes, 1):
            cache.keep(node, float(until))
            assert cache.kept_size() <= 500
        cache.expire(100.0)
    cache.check()
    assert [bool(node.kept_until) for node in nodes] == [number >= 100 for number in range(200)]
    cache.evict(300)
    assert all(node.parent is not None for node in nodes if node.kept_until), "what is kept goes last"
    cache.expire(1e9)
    cache.check()
    assert cache.kept_size() == 0 and len(matched(cache, [199, 199, 1])) == 3


def python_calls(step: Callable[[], object]) -> int:
    """Of the functions of the scheduler and of its tables; each item of a generator counts."""
    calls = Counter[str]()

    def count(frame: FrameType, event: str, arg: object) -> None:
        calls[event] += any(name in frame.f_code.co_filename for name in ("managers/scheduler/", "srt/mem_cache/"))

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls["call"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_only_goes_on_costs_no_call(stream: bool) -> None:
    """As many functions and generators run in a step, however many plain requests do."""
    calls = []
    for count in (4, 64):
        scheduler = make_scheduler(FakeRunner(8192, 1, 512, 80, 256))
        for number in range(count):
            add(scheduler, request(f"r{number}", [number + 5] * 3, 100, ignore_eos=True, stream=stream))
        for _ in range(5):
            scheduler.step()
        assert len(scheduler.running) == count and not scheduler.waiting
        scheduler.outbox.clear()
        calls.append(python_calls(scheduler.step))
        assert len(scheduler.outbox) == stream and all(len(out.rids) == count for out in scheduler.outbox)
    assert calls[0] == calls[1]


@pytest.mark.parametrize("priorities", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_longer_queue_makes_no_step_longer(policy: str, priorities: bool) -> None:
    calls = []
    for num_waiting in (500, 1000):
        scheduler = full_scheduler(policy, num_waiting, enable_priority_scheduling=priorities)
        scheduler.step()
        calls.append(python_calls(scheduler.step))
    assert abs(calls[1] - calls[0]) < 200, "not one for each of those that wait (random looks at others)"


@dataclass(eq=False)
class Waiting:
    priority: int
    max_output: int


def test_the_queue_is_sorted_as_requests_come_and_go() -> None:
    rng, queue, came = random.Random(0), WaitingQueue(lambda r: -r.priority, lambda r: -r.max_output), list[Any]()
    for _ in range(2000):
        if came and rng.random() < 0.45:
            gone = rng.sample(came, min(len(came), rng.choice([1, 1, 3, 40])))
            queue.remove(gone)
            came = [req for req in came if req not in gone]
        else:
            req: Any = Waiting(rng.randrange(3), rng.randrange(4))
            if rng.random() < 0.2:
                queue.appendleft(req)
                came.insert(0, req)
            else:
                queue.append(req)
                came.append(req)
        assert list(queue) == sorted(came, key=lambda req: (-req.priority, -req.max_output))
        assert len(queue) == len(came) and (not came or queue[0] is next(iter(queue)))


@pytest.mark.parametrize("stream", [False, True])
def test_draft_tokens_of_a_request_that_only_goes_on_cost_no_call(stream: bool) -> None:
    calls = []
    for count in (4, 64):
        runner = DraftingRunner(8192, 1, 512, 80, 256, tokens_per_step=4, error_rate=1.0, lookahead_slots=3)
        scheduler = make_scheduler(runner, disable_overlap_schedule=True)
        for number in range(count):
            add(scheduler, request(f"r{number}", [number + 5] * 3, 100, ignore_eos=True, stream=stream))
        for _ in range(5):
            scheduler.step()
        assert len(scheduler.running) == count and runner.steps[-1] == "verify"
        calls.append(python_calls(scheduler.step))
    assert calls[0] == calls[1]


class Asked(frozenset[int]):
    """Stop ids that count how often they are asked."""

    times = 0

    def __contains__(self, token: object) -> bool:
        Asked.times += 1
        return super().__contains__(token)


def test_stop_ids_are_asked_only_for_tokens_that_stop_some_request() -> None:
    scheduler, collector = make_scheduler(FakeRunner(8192, 1, 512, 80, 256)), Collector()
    for number in range(20):
        scheduler.add(request(f"r{number}", [number + 5] * 3, 60, stream=number % 2 == 0), 1, Asked({EOS}))
    scheduler.step()
    scheduler.step()
    Asked.times = 0
    run_to_end(scheduler, collector)
    num_stopped = sum(finish.type == "stop" for finish in collector.finish.values())
    assert 0 < num_stopped < 20 and Asked.times <= 20 + num_stopped
    for number in range(20):
        assert collector.tokens[f"r{number}"] == expected_output([number + 5] * 3, 60)
    assert not scheduler.stops.rows_with_any(np.arange(VOCAB)[:, None]).any()


def test_stop_ids_outside_of_the_vocabulary_stop_nothing() -> None:
    stops = StopTokens(10)
    stops.add({-1, 3, 10, 1 << 40})
    assert stops.rows_with_any(np.array([[2], [9], [3], [NO_TOKEN]])).tolist() == [False, False, True, True]
    stops.remove({-1, 3, 10, 1 << 40})
    assert stops.rows_with_any(np.array([[3, 4], [4, NO_TOKEN]])).tolist() == [False, True]


@pytest.mark.parametrize("interval", [1, 3])
def test_messages_of_streams_that_only_go_on_have_tokens_alone(interval: int) -> None:
    """The first and the last message, and the one after a pause that took its slots, have the counts."""
    scheduler = make_scheduler(FakeRunner(8192, 1, 512, 8, 256), stream_interval=interval)
    add(scheduler, request("r", [5, 6, 7], 30, ignore_eos=True, stream=True))
    messages = []
    for number in range(60):
        if number == 12:
            scheduler.pause("retract")
            scheduler.paused = False
        scheduler.step()
        messages += scheduler.outbox
        scheduler.outbox.clear()
    tokens = [token for message in messages for token in message.new_ids[0]]
    assert tokens == expected_output([5, 6, 7], 30, ignore_eos=True)
    assert [message.meta[0].num_retractions for message in messages if message.meta[0]] == [0, 1, 1]
    assert messages[0].meta[0] and messages[-1].meta[0] and messages[-1].meta[0].completion_tokens == 30


def test_steps_leave_no_cycles_for_the_garbage_collection() -> None:
    """The scheduler's process collects everything only rarely (`scheduler_process.COLLECTIONS`)."""
    scheduler, collector = make_scheduler(FakeRunner(8192, 1, 512, 80, 256)), Collector()
    counts = []
    for round_ in range(4):
        for number in range(40):
            add(scheduler, request(f"r{round_}.{number}", [number + 5] * 30, 20, stream=number % 2 == 0))
        run_to_end(scheduler, collector)
        counts.append(gc.collect())
    assert 0 in counts[1:], "the first round may import modules; threads of earlier tests may leave some in another"


def test_images_of_a_prompt_are_summed_once() -> None:
    """A prompt may have thousands of images, and each step asks which of them fit."""
    additions = Counter[str]()

    class Size(int):
        def __add__(self, other: int) -> Size:
            additions["sizes"] += 1
            return Size(int(self) + int(other))

        __radd__ = __add__

    items = [SimpleNamespace(digest=bytes([number])) for number in range(100)]
    features: Any = SimpleNamespace(size_of=lambda item: Size(10), budget=800)
    steps = MediaSteps(None, lambda: 1, 1)
    steps.features = features
    media: Any = SimpleNamespace(needed=lambda begin, end: [SimpleNamespace(item=item) for item in items])
    assert steps._fitting(media, 0, 100) == items[:80]
    assert steps._fitting(media, 0, 100) == items[:80], "those of the step count once"
    assert additions["sizes"] <= 2 * len(items)


def test_accepted_tokens_are_the_beginnings_of_the_sampled_ones() -> None:
    rng = np.random.default_rng(0)
    tokens, counts = rng.integers(0, 1 << 17, (50, 4)), rng.integers(0, 5, 50).astype(np.int32)
    expected = [row[:count] for row, count in zip(tokens.tolist(), counts.tolist(), strict=True)]
    assert _leading(tokens, counts) == expected
    assert _leading(tokens[:0], counts[:0]) == []


def test_a_step_without_failed_loads_asks_no_request_for_its_load() -> None:
    class Stale(set[object]):
        times = 0

        def __contains__(self, req: object) -> bool:
            Stale.times += 1
            return super().__contains__(req)

    runner = DraftingRunner(8192, 1, 512, 80, 256, tokens_per_step=4, error_rate=1.0, lookahead_slots=3)
    scheduler = make_scheduler(runner)
    for number in range(20):
        add(scheduler, request(f"r{number}", [number + 5] * 3, 100, ignore_eos=True))
    for number in range(8):
        for batch in scheduler.in_flight if number > 3 else ():
            batch.stale = Stale()
        scheduler.step()
    assert runner.steps[-4:] == ["verify"] * 4 and not Stale.times


def test_few_long_prefixes_enter_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of a long prompt wait until it is cached and could then all enter at once, each with its place."""
    monkeypatch.setattr("sglang.srt.managers.scheduler.prompt_choice.MAX_PLACED", 1000)
    runner = FakeRunner(4096, 16, 512, 16, 512)
    scheduler, collector = make_scheduler(runner), Collector()
    written: list[int] = []
    forward = runner.forward

    def counted(step: StepInput) -> LateResult:
        written.append(0 if step.table_update is None else len(step.table_update.index))
        return forward(step)

    runner.forward = counted  # type: ignore[method-assign]
    for number in range(9):
        add(scheduler, request(str(number), [*range(400), number], 4))
    run_to_end(scheduler, collector)
    assert max(written) <= 1000 + 400 + 9 * 16 and len(collector.finish) == 9
    assert_clean(scheduler)
