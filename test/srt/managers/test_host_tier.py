"""Prefixes in main memory over tiny models of every kind of cache, with pools so small that every prefix is evicted,
and copies that are late, fail, or end in another order than they were begun."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from sglang.srt.distributed import parallel_state
from sglang.srt.mem_cache import host_tier
from sglang.srt.mem_cache.copy_engine import PagePool, PendingCopy, ThreadedCopies
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.plan.ranks import ONE_RANK, RankLayout
from sglang.srt.server_args import ServerArgs
from srt.managers.test_random_schedules import Schedule, World, short_pauses
from srt.models.harness import save_tiny


class Trouble(Exception):
    pass


class TroubledCopies(ThreadedCopies):
    """Copies in several threads, each of which sleeps as long as it likes; some fail, and leave garbage behind."""

    def __init__(
        self, pools: Sequence[PagePool], device: torch.device | str, failures: float = 0.1, seed: int = 0
    ) -> None:
        self.random, self.failures, self.failed = random.Random(seed), failures, 0
        super().__init__(pools, device, num_threads=3)

    def run(self, pending: PendingCopy, staging: torch.Tensor) -> None:
        time.sleep(self.random.choice((0, 0, 0.001, 0.004)))
        if self.random.random() < 0.1:
            self._leave_garbage(pending)
            raise Trouble
        super().run(pending, staging)
        time.sleep(self.random.choice((0, 0, 0.001, 0.004)))

    def _leave_garbage(self, pending: PendingCopy) -> None:
        for pool, moves in zip(self.pools, pending.moves, strict=True):
            if len(moves) and pending.to_host:
                pool.host[moves.targets - 1] = 77
            elif len(moves):
                for _, parts in pool.bundles:
                    for part in parts:
                        part[torch.from_numpy(moves.targets)] = 77


class HostWorld(World):
    """A model whose prefixes are kept in main memory by copies that make trouble."""

    def runner(self, page: int, guesses: str, ranks: RankLayout = ONE_RANK) -> tuple[ServerArgs, ModelRunner]:
        args, runner = super().runner(page, guesses, ranks)
        if not isinstance(runner.copies, TroubledCopies):
            assert runner.copies is not None
            runner.copies = TroubledCopies(runner.copies.pools, "cpu", seed=self.rank)
        return args, runner


class HostSchedule(Schedule):
    """A random run in which the GPU's prefixes go more often, and main memory's now and then."""

    def arrive(self) -> None:
        if self.random.random() < 0.7:
            self.forget()
        super().arrive()

    def forget(self) -> None:
        self.scheduler.kv.tree.evict(1000)

    def evict(self) -> None:
        super().evict()
        tier = self.scheduler.host_tier
        if self.random.random() < 0.2:
            tier.host.tree.evict(self.random.randrange(1, 200))
        for window in tier.host.windows:
            window.evict(self.random.randrange(0, 40))

    def run(self) -> None:
        super().run()
        tier = self.scheduler.host_tier
        tier.check()
        self.seen["loaded"] += tier.counts.loaded_tokens
        self.seen["saved"] += tier.counts.saved_tokens
        self.seen["failed"] += tier.counts.failed_copies
        tier.reset()
        usage = tier.usage()
        assert usage["free"] == usage["total"]
        assert all(window["free"] == window["total"] for window in usage["windows"])
        if tier.host.checkpoints is not None:
            assert usage["checkpoints"]["free"] == usage["checkpoints"]["total"] > 0


def schedules(world: HostWorld, guesses: str, page: int, seeds: range) -> Counter[str]:
    seen: Counter[str] = Counter()
    world.prepare()
    for seed in seeds:
        schedule = HostSchedule(world, guesses, page, seed)
        schedule.run()
        seen += schedule.seen
    return seen


@pytest.fixture(autouse=True)
def small_gains(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(host_tier, "LEAST_GAIN", 1)
    with short_pauses():
        yield


OPTIONS = {"enable_hierarchical_cache": True, "hicache_ratio": 3.0}


@pytest.mark.parametrize(
    ("name", "guesses", "page", "policy"),
    [
        ("qwen3", "none", 1, "write_through_selective"),
        ("mistral_windows", "right", 4, "write_through"),
        ("qwen3_5", "half-right", 4, "write_through"),
    ],
)
def test_random_schedules(name: str, guesses: str, page: int, policy: str, tmp_path: Path) -> None:
    world = HostWorld(name, tmp_path, options={**OPTIONS, "hicache_write_policy": policy})
    seen = schedules(world, guesses, page, range(4))
    print(seen)
    assert seen["loaded"] and seen["saved"] and seen["failed"], seen


def _rank(rank: int, name: str, folder: Path, ranks: RankLayout, guesses: str, page: int, num_schedules: int) -> None:
    """What it is alone is known before the ranks meet."""
    host_tier.LEAST_GAIN = 1
    with short_pauses():
        world = HostWorld(name, folder, ranks, rank, {**OPTIONS, "hicache_write_policy": "write_through"})
        world.grow_tree()
        for ids in world.prompts:
            world.alone(ids)
        seen = schedules(world, guesses, page, range(num_schedules))
        assert seen["loaded"] and seen["saved"] and seen["failed"], seen
        parallel_state.shutdown()


SHARED = {"TP2": RankLayout(2), "PP2": RankLayout(pp_size=2)}


@pytest.mark.parametrize(("layout", "name", "page"), [("TP2", "deepseek_v3", 1), ("PP2", "mistral_windows", 4)])
def test_ranks_agree_on_what_was_copied(layout: str, name: str, page: int, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    mp.spawn(_rank, (name, tmp_path, SHARED[layout], "none", page, 3), nprocs=2)
