"""Prefixes in files over tiny models of every kind of cache: servers that start again over one directory, with pools so
small that every prefix is evicted from the GPU and from main memory, and jobs that are late, fail, or end in another
order than they were begun."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from sglang.srt.distributed import parallel_state
from sglang.srt.managers.front.native_output import request_info
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.wire.io_struct import AbortReq
from sglang.srt.mem_cache import host_tier
from sglang.srt.mem_cache.storage import engine as engines
from sglang.srt.mem_cache.storage import prefix_names
from sglang.srt.mem_cache.storage import tier as tiers
from sglang.srt.mem_cache.storage.engine import Lookup, Read, StorageEngine, StorageJob, Write
from sglang.srt.mem_cache.storage.file_store import FileStore
from sglang.srt.mem_cache.storage.tier import StorageTier
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.plan.ranks import ONE_RANK, RankLayout
from sglang.srt.server_args import ServerArgs
from srt.managers.fake_runner import Collector
from srt.managers.test_host_tier import EVERY_CACHE, OPTIONS, PROMPT, HostSchedule, HostWorld, Server
from srt.managers.test_random_schedules import GARBAGE, GUESSES, short_pauses
from srt.models.harness import random_tokens, save_tiny

STORAGE = {
    **OPTIONS,
    "hicache_write_policy": "write_through",
    "hicache_storage_backend": "file",
    "hicache_storage_prefetch_policy": "wait_complete",
}


class TroubledStore(FileStore):
    """Files that are late, and go missing or bad now and then."""

    def __init__(self, directory: Path, seed: int = 0) -> None:
        super().__init__(directory, max_bytes=1 << 20, min_free=0)
        self.random, self.troubles = random.Random(seed), Counter[str]()

    def read(self, name: str) -> bytearray | None:
        time.sleep(self.random.choice((0, 0, 0.001, 0.004)))
        data, chance = super().read(name), self.random.random()
        if data is None or chance > 0.15:
            return data
        if chance < 0.05:
            self.troubles["missing"] += 1
            return None
        if chance < 0.1:
            self.troubles["short"] += 1
            return data[: self.random.randrange(len(data))]
        data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        self.troubles["flipped"] += 1
        return data

    def write(self, name: str, data: bytearray) -> None:
        time.sleep(self.random.choice((0, 0, 0.001, 0.004)))
        super().write(name, data)


class TroubledEngine(StorageEngine):
    """Some jobs fail, half-way or at once; those that read leave garbage behind."""

    def __init__(self, of: StorageEngine, store: TroubledStore) -> None:
        super().__init__(store, of.pools, of.fingerprint, of.page_size, of.num_windows)
        self.random = store.random

    def run(self, job: StorageJob) -> None:
        trouble = isinstance(job, Lookup | Read | Write) and self.random.random() < 0.1
        if trouble and isinstance(job, Read):
            assert job.pages is not None
            for part, pool in zip([job.pages.tokens, *job.pages.windows], self.pools, strict=False):
                pool.host[torch.from_numpy(part[part > 0] - 1)] = 77
        if trouble and self.random.random() < 0.5:
            raise OSError("trouble")
        super().run(job)
        if trouble and isinstance(job, Write):
            raise OSError("trouble")


class StorageWorld(HostWorld):
    """A model whose prefixes are kept in files, too, by stores and copies that make trouble."""

    def runner(self, page: int, guesses: str, ranks: RankLayout = ONE_RANK) -> tuple[ServerArgs, ModelRunner]:
        args, runner = super().runner(page, guesses, ranks)
        if runner.storage is not None and not isinstance(runner.storage, TroubledEngine):
            store = TroubledStore(self.folder / "files", seed=self.rank)
            runner.storage = TroubledEngine(runner.storage, store)
        return args, runner


class StorageSchedule(HostSchedule):
    """A random run that begins with nothing but files, and in which main memory loses prefixes often."""

    def __init__(self, world: HostWorld, guesses: str, page: int, seed: int) -> None:
        super().__init__(world, guesses, page, seed)
        for pool in world.runner(page, guesses, world.ranks)[1].copies.pools:
            pool.host.fill_(99)

    @property
    def storage(self) -> StorageTier:
        tier = self.scheduler.host_tier
        assert tier is not None and tier.storage is not None
        return tier.storage

    def forget(self) -> None:
        super().forget()
        if self.random.random() < 0.7:
            self.scheduler.host_tier.host.tree.evict(1000)

    def run(self) -> None:
        super().run()
        counts = self.storage.counts
        self.seen["read"] += counts.read_tokens
        self.seen["written"] += counts.written_tokens
        self.seen["unfulfilled"] += counts.unfulfilled_tokens
        assert not self.storage.busy


def schedules(world: StorageWorld, guesses: str, page: int, seeds: range) -> Counter[str]:
    seen: Counter[str] = Counter()
    world.prepare()
    for seed in seeds:
        schedule = StorageSchedule(world, guesses, page, seed)
        schedule.run()
        seen += schedule.seen
    storage = world.runner(page, guesses, world.ranks)[1].storage
    assert isinstance(storage, TroubledEngine)
    return seen + storage.store.troubles


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(host_tier, "LEAST_GAIN", 1)
    monkeypatch.setattr(prefix_names, "LEAST_BLOCK", 8)
    monkeypatch.setattr(engines, "RETRY_S", 0.0)
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "files"))
    with short_pauses():
        yield


EXTRA = {"hicache_storage_backend_extra_config": '{"prefetch_threshold": 1}'}


@pytest.mark.parametrize(
    ("name", "guesses", "page", "policy"),
    [("mistral_windows", "none", 4, "wait_complete"), ("qwen3_5", "half-right", 4, "timeout")],
)
def test_random_schedules(name: str, guesses: str, page: int, policy: str, tmp_path: Path) -> None:
    world = StorageWorld(name, tmp_path, options={**STORAGE, **EXTRA, "hicache_storage_prefetch_policy": policy})
    seen = schedules(world, guesses, page, range(4))
    assert seen["read"] and seen["written"] and seen["unfulfilled"] and seen["flipped"], seen
