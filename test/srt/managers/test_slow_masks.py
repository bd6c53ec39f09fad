"""Requests whose grammars take long to follow bring tokens in turns, so that steps stay short for all others."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang.srt.constrained.grammar import FOLLOW_BURST_S, FOLLOW_REFILL_S, Grammar
from sglang.srt.constrained.mask_filler import MaskFiller
from sglang.srt.distributed import parallel_state
from sglang.srt.managers.scheduler.attention_groups import AttentionGroups
from sglang.srt.managers.scheduler.counters import Counters
from sglang.srt.managers.scheduler.leader import LeaderDecision, SlowMask
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.running_batch import MAX_MASK_MS, RunningBatch
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.utils.allowance import Allowance
from srt.managers.fake_runner import (
    Collector,
    FakeRunner,
    add,
    assert_clean,
    expected_output,
    make_scheduler,
    request,
    run_to_end,
)

OUTPUT = 30


class Time:
    """A clock that only masks move on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Following:
    """A matcher that allows everything, and takes its time for each mask."""

    def __init__(self, time: Time, mask_s: float) -> None:
        self.time, self.mask_s, self.filled = time, mask_s, 0

    def fill_mask(self, row: np.ndarray) -> None:
        self.time.now += self.mask_s
        self.filled += 1

    def accept(self, token: int) -> bool:
        return True

    def is_terminated(self) -> bool:
        return False


class AllAtOnce:
    """A compiled grammar whose masks are filled in one call."""

    vocab_size = size_bytes = 1

    @staticmethod
    def fill_masks(matchers: list[Following], mask: np.ndarray, rows: list[int], threads: int) -> None:
        for matcher, row in zip(matchers, rows, strict=True):
            matcher.fill_mask(mask[row])


class World:
    """A scheduler whose grammars take a time of their own."""

    def __init__(self, tell: Any = None, max_running: int = 32, **options: Any) -> None:
        self.time = Time()
        runner = FakeRunner(128 * max_running, 1, 128, max_running, 8 * max_running)
        self.scheduler: Scheduler = make_scheduler(runner, **options)
        self.scheduler.stop_checker = StopChecker(object(), tell)  # type: ignore[arg-type]
        self.scheduler.masks = MaskFiller(1, self.time)
        self.collector = Collector()
        self.matchers: dict[str, Following] = {}

    def add(self, rid: str, mask_s: float | None = None) -> None:
        add(self.scheduler, request(rid, self.prompt(rid), OUTPUT, ignore_eos=True))
        if mask_s is not None:
            self.matchers[rid] = Following(self.time, mask_s)
            grammar = self.scheduler.reqs[rid].grammar = Grammar(AllAtOnce(), self.matchers[rid])  # type: ignore[arg-type]
            grammar.allowance = Allowance(FOLLOW_BURST_S, FOLLOW_REFILL_S, self.time)

    @staticmethod
    def prompt(rid: str) -> list[int]:
        return [5, 6, len(rid), *rid.encode()]

    def step(self) -> float:
        """Returns the seconds that the step took for masks."""
        before = self.time.now
        self.scheduler.step()
        self.collector.take(self.scheduler)
        return self.time.now - before

    def finish(self) -> None:
        run_to_end(self.scheduler, self.collector)
        for rid, tokens in self.collector.tokens.items():
            assert tokens == expected_output(self.prompt(rid), OUTPUT, ignore_eos=True)
            assert self.collector.finish[rid].type == "length"
        assert_clean(self.scheduler)


@pytest.mark.parametrize("overlap", [True, False])
def test_slow_grammars_do_not_hold_up_others(overlap: bool) -> None:
    world = World(disable_overlap_schedule=not overlap)
    for i in range(16):
        world.add(f"slow {i}", 0.004)
    world.add("plain")
    world.add("fast", 0.00001)
    times = [world.step() for _ in range(OUTPUT + 4)]
    assert max(times) > 0.06, "the first steps show which are slow"
    assert max(times[6:]) <= MAX_MASK_MS / 1000 + 0.001
    assert world.collector.finish.keys() == {"plain", "fast"}, "they have got a token in every step"
    counts = [world.matchers[f"slow {i}"].filled for i in range(16)]
    assert max(counts) - min(counts) <= 1, "each has its turn"
    world.finish()
    assert len(world.collector.finish) == 18


def test_one_slow_grammar_never_waits() -> None:
    world = World()
    world.add("slow", 0.02)
    world.add("plain")
    for _ in range(8):
        world.step()
    assert world.matchers["slow"].filled >= 7
    world.scheduler.reqs["slow"].grammar.allowance = Allowance(9.0, 9.0, world.time)  # type: ignore[union-attr]
    world.finish()


def test_the_leader_tells_all_ranks() -> None:
    """With several ranks the leader tells what it has measured, and acts on it only when it has heard itself."""
    told: list[LeaderDecision] = []
    world = World(told.append)
    world.add("slow", 0.006)
    world.add("fast", 0.0001)
    for _ in range(4):
        world.step()
    assert told and set(map(repr, told)) == {repr(SlowMask("slow", 8))} and not world.scheduler.reqs["slow"].mask_ms
    world.scheduler.note_slow_mask("slow", 8)
    world.scheduler.note_slow_mask("ended", 8)
    told.clear()
    world.step()
    world.matchers["slow"].mask_s = 0.0
    for _ in range(4):
        world.step()
    assert told[-1] == SlowMask("slow", 0)
    world.scheduler.note_slow_mask("slow", 0)
    world.finish()


def test_a_grammar_that_has_become_quick_no_longer_waits_for_its_turn() -> None:
    """Also where masks are filled in one call: a step has few of those that wait for their turns."""
    world, names = World(max_running=150), [str(i) for i in range(150)]
    for name in names:
        world.add(name, 0.002)
    for _ in range(4):
        world.step()
    reqs = world.scheduler.reqs
    assert all(reqs[name].mask_ms for name in names)
    for name in names:
        world.matchers[name].mask_s = 0.00002
    for _ in range(90):
        world.step()
    assert not any(req.mask_ms for req in reqs.values())
    world.finish()


def test_the_leader_learns_what_masks_of_other_groups_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank fills the masks of its own group. Afterwards all know the same of slow grammars."""
    time = Time()
    ranks: list[list[Grammar]] = []
    for group in range(2):
        copies = []
        for owner, mask_s in ((0, 0.001), (1, 0.03), (1, 0.00001)):
            grammar = Grammar(AllAtOnce(), Following(time, mask_s))  # type: ignore[arg-type]
            grammar.allowance = Allowance(FOLLOW_BURST_S, FOLLOW_REFILL_S, time)
            for _ in range(9 if owner == group else 0):
                grammar.fill_mask(np.zeros(1, np.int32))
            copies.append(grammar)
        ranks.append(copies)
    told: list[list[int]] = []
    for values in (None, told):  # as all ranks tell, then as all hear
        for group, copies in enumerate(ranks):
            groups: Any = SimpleNamespace(group=group)
            batches: Any = [
                SimpleNamespace(needs_mask=True, limited=[SimpleNamespace(grammar=grammar) for grammar in part])
                for part in (copies[:1], copies[1:])
            ]
            if values is None:
                monkeypatch.setattr(parallel_state, "all_reduce_min", lambda own: (told.append(own), own)[1])
            else:
                agreed = [min(both) for both in zip(*told[:2], strict=True)]
                monkeypatch.setattr(parallel_state, "all_reduce_min", lambda own, agreed=agreed: agreed)
            AttentionGroups._share_mask_times(groups, batches)
    for one, other in zip(*ranks, strict=True):
        assert one.mask_s == pytest.approx(other.mask_s, abs=1e-8)
        assert one.allowance.left_s == pytest.approx(other.allowance.left_s, abs=1e-8)
    assert [grammar.allowance.exhausted for grammar in ranks[0]] == [False, True, False]


def running_batch(num_requests: int, microbatches: int, slow: set[int], tokens: int = 1) -> RunningBatch:
    counters = Counters(16)
    batch = RunningBatch(counters, tokens, 0, microbatches)
    for slot in range(1, num_requests + 1):
        counters.kv_len[slot] = counters.planned_len[slot] = 10
        counters.mask_ms[slot] = 8 * (slot in slow)
        req: Any = SimpleNamespace(slot=slot, limit=10_000, max_width=lambda most: most, microbatch=0, rid=slot)
        batch.add([req])
    return batch


def test_each_draft_token_has_a_mask() -> None:
    """So fewer requests with draft tokens have their turn in a step."""
    batch = running_batch(8, 1, set(range(1, 9)), tokens=4)
    batch.counters.mask_ms[:] //= 8
    batch.counters.num_speculative_tokens[:] = 3
    batch.take_turns()
    assert np.count_nonzero(batch.widths(4)) == MAX_MASK_MS // 4


@pytest.mark.parametrize(
    ("num_requests", "microbatches", "slow", "prompts_between"), [(2, 1, {1, 2}, True), (8, 2, {1, 3, 6, 8}, False)]
)
def test_everyone_has_turns(num_requests: int, microbatches: int, slow: set[int], prompts_between: bool) -> None:
    """Also where steps of prompts alone come between, and in each microbatch."""
    batch, tokens = running_batch(num_requests, microbatches, slow), Counter[int]()
    for step in range(100):
        batch.take_turns()
        if prompts_between and step % 2:
            continue
        widths = batch.widths(1)
        batch.counters.launched(batch.slots, widths, batch.reserved_lens, 0)
        batch.counters.kv_len[batch.slots] -= widths
        batch.counters.planned_len[batch.slots] -= widths
        tokens.update(batch.slots[widths > 0].tolist())
        batch.next_microbatch()
    assert len({tokens[slot] for slot in slow}) == 1 and min(tokens[slot] for slot in slow) >= 20
