"""Work of the host where one step changes many requests at once: it grows with their number, not with its square."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang.srt.configs.storage_backend import read_storage_config
from sglang.srt.managers.scheduler import prompt_media, request_timeouts
from sglang.srt.managers.scheduler.prompt_choice import PromptChoice
from sglang.srt.managers.scheduler.prompt_media import PromptMedia
from sglang.srt.managers.scheduler.request_timeouts import CHECK_INTERVAL_S, RequestTimeouts
from sglang.srt.managers.scheduler.retraction import preempt, retract_until_it_fits
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.stale_steps import redo_stale
from sglang.srt.mem_cache.cache_tier import CacheTier
from sglang.srt.mem_cache.host_tier import host_tables
from sglang.srt.mem_cache.storage import tier as storage_tier
from sglang.srt.mem_cache.storage.tier import MAX_PREFETCHES, StorageTier
from srt.managers.fake_runner import FakeRunner, add, make_scheduler, request
from srt.managers.test_full_queue import python_calls


def running(count: int, **options: object) -> Scheduler:
    """`count` requests that decode."""
    scheduler = make_scheduler(FakeRunner(16384, 1, 4096, 300, 256), **options)
    for number in range(count):
        add(scheduler, request(f"r{number}", [number + 5] * 3, 100, ignore_eos=True))
    while scheduler.waiting:
        scheduler.step()
    scheduler.sync()
    assert len(scheduler.running) == count
    return scheduler


def is_linear(calls: dict[int, int]) -> bool:
    """calls: by the number of requests, two numbers of which one is four times the other."""
    few, many = sorted(calls)
    return many == 4 * few and calls[many] < 5 * calls[few]


def test_retraction_of_many() -> None:
    calls = {}
    for count in (40, 160):
        scheduler = running(count)
        answers = iter([False] * (count // 2) + [True] * count)
        scheduler.kv.can_grow = lambda *lens, answers=answers: next(answers)  # type: ignore[method-assign]
        calls[count] = python_calls(lambda scheduler=scheduler: retract_until_it_fits(scheduler, 1))
        assert len(scheduler.running) == len(scheduler.waiting) == scheduler.stats.num_retracted == count // 2
        assert {req.slot for req in scheduler.running.reqs} == set(scheduler.running.slots.tolist())
    assert is_linear(calls), calls


def test_preemption_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {}
    for count in (40, 160):
        scheduler = running(count, enable_priority_scheduling=True)
        important = request("important", [3, 4], 100)
        important.priority = 100
        add(scheduler, important)
        answers = iter([False] * (count // 2) + [True] * count)
        monkeypatch.setattr(PromptChoice, "fits", lambda self, req, answers=answers: next(answers))
        priorities = scheduler.priorities
        assert priorities is not None
        calls[count] = python_calls(lambda one=scheduler, of=priorities: preempt(one, of))
        assert len(scheduler.waiting) == count // 2 and len(scheduler.running) == count // 2 + 1
    assert is_linear(calls), calls


def test_steps_computed_again() -> None:
    calls = {}
    for count in (40, 160):
        scheduler = running(count)
        wrong = {req.node for req in scheduler.running.reqs[: count // 2]}
        tier = SimpleNamespace(wrong_nodes=lambda wrong=wrong: wrong, forget_wrong=lambda: None)
        scheduler.host_tier = tier  # type: ignore[assignment]
        calls[count] = python_calls(lambda scheduler=scheduler: redo_stale(scheduler))
        assert [req.rid for req in scheduler.running.reqs] == [f"r{number}" for number in range(count // 2, count)]
        assert [req.rid for req in scheduler.waiting] == [f"r{number}" for number in range(count // 2)]
    assert is_linear(calls), calls


class Counted(dict[str, Any]):
    """Counts how often all are looked at."""

    times = 0

    def values(self) -> Any:
        self.times += 1
        return super().values()


def test_time_limits_look_at_requests_when_one_may_be_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(request_timeouts.time, "monotonic", lambda: now[0])
    scheduler, timeouts = running(4), RequestTimeouts(60.0, 60.0)
    reqs = scheduler.reqs = Counted(scheduler.reqs)
    overdue = []
    while not overdue:
        now[0] += CHECK_INTERVAL_S
        overdue = timeouts.overdue(scheduler)
    assert now[0] == pytest.approx(1060.0, abs=2 * CHECK_INTERVAL_S) and sorted(overdue[0].rids) == [*reqs]
    assert reqs.times <= 3


def test_a_chunk_looks_at_its_own_images(monkeypatch: pytest.MonkeyPatch) -> None:
    searches, searched = Counter[str](), np.searchsorted

    def search(*args: Any, **options: Any) -> Any:
        searches["times"] += 1
        return searched(*args, **options)

    items = [
        SimpleNamespace(spans=[(4 * i, 4 * i + 2)], grid=(1, 1, 2), pixels=SimpleNamespace(shape=[2]), number=i)
        for i in range(1000)
    ]
    description: Any = SimpleNamespace(
        tower=SimpleNamespace(pooled_frames=1), num_tokens=lambda grid: 2, both_ways=True, sections=False, fill=0
    )
    media = PromptMedia(items, 4000, description)  # type: ignore[arg-type]
    monkeypatch.setattr(prompt_media.np, "searchsorted", search)
    needed = media.needed(2001, 2010)
    assert [rows.item.number for rows in needed] == [500, 501, 502]  # type: ignore[attr-defined]
    assert [rows.tokens.tolist() for rows in needed] == [[0], [3, 4], [7, 8]]
    assert [rows.features.tolist() for rows in needed] == [[1], [0, 1], [0, 1]]
    assert (media.uncut_end(2001, 2009), media.uncut_end(2001, 2010), media.uncut_end(2001, 2011)) == (2008, 2010, 2011)
    assert media.uncut_end(2000, 2001) == 2000 and media.run_end(2001) == 2002
    assert searches["times"] <= 20


def test_a_prefix_is_looked_up_once_while_the_store_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps ask for each waiting request anew; only the end of a read may give it another answer."""
    looked_up = Counter[str]()
    prefix = CacheTier.prefix

    def counted(self: CacheTier, keys: Any, namespace: str | None) -> Any:
        looked_up["times"] += 1
        return prefix(self, keys, namespace)

    monkeypatch.setattr(CacheTier, "prefix", counted)
    monkeypatch.setattr(storage_tier, "Lookup", lambda keys, namespace, **rest: SimpleNamespace(
        keys=keys, namespace=namespace, stopping=False, begun=0.0, end=0, **rest
    ))  # fmt: skip
    tables = host_tables(FakeRunner(16384, 1, 4096, 300, 256).plan.pool_sizes)
    engine: Any = SimpleNamespace(block=1, submit=lambda job: None)
    config = read_storage_config("file", "wait_complete", None)
    assert config is not None
    tier = StorageTier(config, engine, tables, tables, list)

    def stored(number: int) -> Any:
        keys = np.full(2000, number, np.int64)
        return SimpleNamespace(
            rid=f"r{number}", namespace=None, looked_up=False, num_stored=0, finish=None,
            matchable_len=lambda: 2000, cache_keys=lambda length: keys[:length],
        )  # fmt: skip

    reqs = [stored(number) for number in range(MAX_PREFETCHES + 50)]
    for req in reqs[:MAX_PREFETCHES]:
        assert tier.waits(req)
    looked_up.clear()
    for _ in range(20):
        assert not any(map(tier.waits, reqs[MAX_PREFETCHES:]))
    assert looked_up["times"] == 0, "others have nothing in common with these"
    alike = stored(0)
    assert tier.waits(alike), "it waits for what another one reads"
    looked_up.clear()
    tier._end_prefetch(tier._prefetches[0], 0, 0)
    for _ in range(20):
        assert [tier.waits(req) for req in reqs[MAX_PREFETCHES:]] == [True] + [False] * 49
    assert looked_up["times"] <= 2
