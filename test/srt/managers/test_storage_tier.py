"""Prefixes in files over tiny models of every kind of cache: servers that start again over one directory, with pools so
small that every prefix is evicted from the GPU and from main memory, and jobs that are late, fail, or end in another
order than they were begun."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from matrix import FEATURES, KINDS, LAYOUTS, cells, save_kind, smallest_kinds
from pairs import some_of
from rank_processes import run_ranks

from sglang.srt.distributed import parallel_state
from sglang.srt.managers.front.native_output import request_info
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_runner, create_storage
from sglang.srt.managers.wire.io_struct import AbortReq
from sglang.srt.mem_cache import host_tier
from sglang.srt.mem_cache.page_pool import PagePool
from sglang.srt.mem_cache.storage import engine as engines
from sglang.srt.mem_cache.storage import prefix_names
from sglang.srt.mem_cache.storage.engine import Lookup, Read, StorageEngine, StorageJob, Write
from sglang.srt.mem_cache.storage.file_store import FileStore
from sglang.srt.mem_cache.storage.prefix_names import PrefixNames
from sglang.srt.mem_cache.storage.tier import StorageTier
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.plan.host_cache import COPIED
from sglang.srt.plan.ranks import ONE_RANK, RankLayout
from sglang.srt.server_args import ServerArgs
from srt.managers.fake_runner import Collector, add, request, run_to_end
from srt.managers.test_host_tier import (
    OPTIONS,
    OTHER,
    PROMPT,
    HostSchedule,
    HostWorld,
    Server,
    loads_by_layers_sometimes,
)
from srt.managers.test_random_schedules import DRAFT_TOKENS, FEW_PROMPTS, GARBAGE, PAGES, short_pauses
from srt.models.harness import random_tokens

STORAGE = {
    **OPTIONS,
    "hicache_write_policy": "write_through",
    "hicache_storage_backend": "file",
    "hicache_storage_prefetch_policy": "wait_complete",
}


class TroubledStore(FileStore):
    """Files that are late, and go missing or bad now and then."""

    def __init__(self, directory: Path, seed: int = 0) -> None:
        super().__init__(directory, max_bytes=1 << 22, min_free=0)
        self.random, self.troubles = random.Random(seed), Counter[str]()

    def read(self, name: str) -> bytearray | None:
        time.sleep(self.random.choice((0, 0, 0.001, 0.004)))
        data, chance = super().read(name), self.random.random()
        if data is None or chance > 0.06:
            return data
        if chance < 0.02:
            self.troubles["missing"] += 1
            return None
        if chance < 0.04:
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
        trouble = isinstance(job, Lookup | Read | Write) and self.random.random() < 0.08
        if trouble and isinstance(job, Read):
            assert job.pages is not None
            with job.moving:
                for part, pool in zip([job.pages.tokens, *job.pages.windows], self.pools, strict=False):
                    if not job.stopping:
                        pool.host[torch.from_numpy(part[part > 0] - 1)] = 77
        if trouble and self.random.random() < 0.5:
            raise OSError("trouble")
        super().run(job)
        if trouble and isinstance(job, Write):
            raise OSError("trouble")


class StorageWorld(HostWorld):
    """A model whose prefixes are kept in files, too, by stores and copies that make trouble."""

    copies: str | None = None
    """The policy of copies to main memory; None: that of the options."""

    def runner(self, page: int, draft_tokens: str, ranks: RankLayout = ONE_RANK) -> tuple[ServerArgs, ModelRunner]:
        args, runner = super().runner(page, draft_tokens, ranks)
        if not isinstance(runner.storage, TroubledEngine):
            storage = create_storage(args, runner, self.rank)
            assert storage is not None
            runner.storage = TroubledEngine(storage, TroubledStore(self.folder / "files", seed=self.rank))
        return args, runner


class StorageSchedule(HostSchedule):
    """A random run that begins with nothing but files, and in which main memory loses prefixes often."""

    def __init__(self, world: StorageWorld, draft_tokens: str, page: int, seed: int) -> None:
        super().__init__(world, draft_tokens, page, seed)
        for pool in world.runner(page, draft_tokens, world.ranks)[1].copies.pools:
            pool.host.fill_(99)
        if world.copies is not None:
            self.scheduler.host_tier.use_policy(world.copies)

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


def schedules(world: StorageWorld, draft_tokens: str, page: int, seeds: range) -> Counter[str]:
    seen: Counter[str] = Counter()
    world.prepare()
    with loads_by_layers_sometimes():
        for seed in seeds:
            schedule = StorageSchedule(world, draft_tokens, page, seed)
            schedule.run()
            seen += schedule.seen
    storage = world.runner(page, draft_tokens, world.ranks)[1].storage
    assert isinstance(storage, TroubledEngine)
    return seen + storage.store.troubles


def make_sizes_small(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(host_tier, "MIN_GAIN", 1)
    patch.setattr(prefix_names, "MIN_BLOCK", 8)
    patch.setattr(engines, "RETRY_S", 0.0)
    patch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(folder / "files"))


EVERY_CACHE = [(name, dtype) for dtype in (None, "fp8", "fp4") for _, name in cells(smallest_kinds(), feature=dtype)]
FEW_DTYPES = [(name, dtype) for name, dtype in EVERY_CACHE if dtype is None or name == "dense"]


def flags_of(dtype: str | None) -> dict[str, Any]:
    return dict(FEATURES[dtype].flags) if dtype else {}


def pages_of(name: str) -> tuple[int, ...]:
    whole = KINDS[name].page
    return tuple(page for page in sorted({*PAGES, whole}) if page % whole == 0)


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    make_sizes_small(monkeypatch, tmp_path)
    with short_pauses():
        yield


EXTRA = {"hicache_storage_backend_extra_config": '{"prefetch_threshold": 1}'}


@pytest.mark.parametrize(
    ("name", "draft_tokens", "page", "policy"),
    [("windows alone", "none", 4, "wait_complete"), ("gated delta", "half-right", 4, "timeout")],
)
def test_random_schedules(name: str, draft_tokens: str, page: int, policy: str, tmp_path: Path) -> None:
    options = {**STORAGE, **EXTRA, "hicache_storage_prefetch_policy": policy}
    world = StorageWorld(name, tmp_path, options=options, num_prompts=FEW_PROMPTS)
    seen: Counter[str] = Counter()
    for seed in range(24):  # threads decide what is read
        seen += schedules(world, draft_tokens, page, range(seed, seed + 1))
        if seen["read"] and seen["written"] and seen["unfulfilled"]:
            return
    raise AssertionError(seen)


@pytest.mark.slow
@pytest.mark.schedules
@pytest.mark.timeout(0)
@pytest.mark.parametrize("policy", ["best_effort", "wait_complete", "timeout"])
@pytest.mark.parametrize(("kind", "dtype"), FEW_DTYPES)
def test_many_random_schedules(kind: str, dtype: str | None, policy: str, tmp_path: Path) -> None:
    """policy: how long prompts wait for files. Main memory gets its copies as each of its own policies has it."""
    options = {**STORAGE, **EXTRA, "hicache_storage_prefetch_policy": policy, **flags_of(dtype)}
    world = StorageWorld(kind, tmp_path, options=options)
    for page in pages_of(kind):
        for draft_tokens in DRAFT_TOKENS:
            seen: Counter[str] = Counter()
            for number, copies in enumerate(COPIED):
                world.copies = copies
                seen += schedules(world, draft_tokens, page, range(7 * number, 7 * number + 7))
            assert seen["written"] and (seen["read"] or policy == "best_effort"), (page, draft_tokens, seen)


def _rank(
    rank: int, kind: str, folder: Path, ranks: RankLayout, draft_tokens: str, page: int, num_schedules: int, policy: str
) -> None:
    """What it is alone is known before the ranks meet. policy: when prefixes are copied to main memory."""
    with short_pauses(), pytest.MonkeyPatch.context() as patch:
        make_sizes_small(patch, folder)
        options = {**STORAGE, **EXTRA, "hicache_write_policy": policy}
        world = StorageWorld(kind, folder, ranks, rank, options)
        world.grow_tree()
        for ids in world.prompts:
            world.alone(ids)
        seen = schedules(world, draft_tokens, page, range(num_schedules))
        assert seen["written"] and seen["read"] + seen["unfulfilled"], seen
        parallel_state.shutdown()


@pytest.mark.slow
@pytest.mark.thorough
def test_two_ranks_agree_on_what_was_read(tmp_path: Path) -> None:
    save_kind("dense", tmp_path)
    run_ranks(_rank, ("dense", tmp_path, RankLayout(2), "none", 4, 2, "write_through"), 2)


@pytest.mark.slow
@pytest.mark.schedules
@pytest.mark.timeout(0)
@pytest.mark.parametrize("policy", COPIED)
@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        *cells(("latents", "windows alone", "gated delta"), ("TP2", "PP2", "TP2 x PP2")),
        *cells(("latents", "windows, KV head", "gated delta, KV head"), ("DCP2", "DCP2 x PP2")),
    ],
)
def test_ranks_agree_on_what_was_read(layout: str, kind: str, policy: str, tmp_path: Path) -> None:
    save_kind(kind, tmp_path)
    ranks = LAYOUTS[layout]
    run_ranks(_rank, (kind, tmp_path, ranks, "half-right", 4, 10, policy), ranks.world_size)


# --- one thing at a time ----------------------------------------------------------------------------------------------


class GatedStore(FileStore):
    """Files that are read when the gate is open, and that fail if they are told to."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, min_free=0)
        self.gate, self.fails = threading.Event(), False
        self.gate.set()

    def read(self, name: str) -> bytearray | None:
        assert self.gate.wait(300)
        if self.fails:
            raise OSError("no answer")
        return super().read(name)


class StorageServer(Server):
    """A server whose files are read through a gate."""

    def __init__(self, folder: Path, name: str = "qwen3", **options: Any) -> None:
        super().__init__(folder, name, **{**STORAGE, **EXTRA, **options})
        assert self.runner.storage is not None and self.tier.storage is not None
        self.storage = self.tier.storage
        self.files = GatedStore(self.runner.storage.store.directory)
        self.runner.storage.store = self.files

    def check(self) -> None:
        super().check()
        assert not self.storage.busy

    def answer_of(self, rid: str) -> list[int]:
        """Returns the answer of a request that was added; jobs of the store may go on behind it."""
        while rid not in self.collector.finish:
            self.steps(1)
        return self.collector.tokens[rid]

    def rest(self) -> None:
        while not self.scheduler.idle:
            self.steps(1)

    def forget(self) -> None:
        """Nothing stays but files."""
        assert self.scheduler.flush_cache()


def details(server: StorageServer, rid: str) -> dict[str, int]:
    info = request_info(rid, server.meta[rid], None)["cached_tokens_details"]
    return {key: value for key, value in info.items() if value or key == "storage"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("qwen3")


@pytest.mark.parametrize(("kind", "dtype"), some_of(EVERY_CACHE, FEW_DTYPES))
def test_a_server_that_starts_again_finds_the_same_bytes(kind: str, dtype: str | None, tmp_path: Path) -> None:
    """Of every page and state, also where a chunk ended; and it goes on from there as from what it computes itself."""
    name, options = KINDS[kind].tiny, {**flags_of(dtype), "page_size": pages_of(kind)[-1]}
    before = StorageServer(tmp_path / "model", name, **options)
    answer = before.answer("first", PROMPT)
    assert before.storage.counts.written_tokens
    saved = prefix_bytes(before, PROMPT)
    before.check()
    after = StorageServer(tmp_path / "model", name, **options)
    assert after.answer("second", PROMPT) == answer
    meta = after.meta["second"]
    assert meta.cached_tokens >= 64 and details(after, "second") == {"storage": meta.cached_tokens}
    loaded = prefix_bytes(after, PROMPT[: meta.cached_tokens])
    assert loaded and loaded.keys() <= saved.keys()
    for part in loaded:
        assert torch.equal(loaded[part], saved[part]), f"{part} is not what was saved"
    assert after.answer("third", PROMPT) == answer and details(after, "third") == {
        "device": after.meta["third"].cached_tokens,
        "storage": 0,
    }
    after.forget()
    longer = [*PROMPT, *answer, *random_tokens(37, seed=5)]
    assert after.answer("goes on", longer) == plain_answer(tmp_path / "model", longer, options)
    assert details(after, "goes on")["storage"] >= 64
    after.check()


def prefix_bytes(server: Server, ids: list[int]) -> dict[tuple[str, int, int], torch.Tensor]:
    """What the GPU has of a prompt: by kind, number of the pool, and position (a page's first) or depth of a state."""
    kv, pools = server.scheduler.kv, server.copies.pools
    page, nodes, content = kv.page_size, kv.tree.follow(np.array(ids, np.int64)), {}
    for node in nodes:
        begin = node.depth - node.key.size
        for number, slots in enumerate([node.value, *node.windows]):
            for i in range(0, node.key.size, page):
                if slots[i]:
                    content["page", number, begin + i] = row_bytes(pools[number], int(slots[i]) // page)
        if node.checkpoint:
            content["state", len(pools) - 1, node.depth] = row_bytes(pools[-1], node.checkpoint)
    return content


def row_bytes(pool: PagePool, row: int) -> torch.Tensor:
    return torch.cat([torch.empty(0, dtype=torch.uint8), *(part[row] for part in pool.parts)])


def plain_answer(folder: Path, ids: list[int], options: dict[str, Any]) -> list[int]:
    """Without any cache, in one chunk."""
    args = ServerArgs.from_kwargs(
        model_path=str(folder), device="cpu", skip_tokenizer_init=True, skip_server_warmup=True, random_seed=1,
        max_total_tokens=512, max_running_requests=4, disable_radix_cache=True, **options,
    )  # fmt: skip
    scheduler, collector = Scheduler(args, create_runner(args), StopChecker(None)), Collector()
    add(scheduler, request("plain", ids, 8, temperature=0.0, ignore_eos=True))
    run_to_end(scheduler, collector)
    return collector.tokens["plain"]


def test_other_models_and_namespaces_find_nothing(folder: Path, tmp_path: Path) -> None:
    server = StorageServer(folder)
    server.answer("first", PROMPT)
    for options in (
        {"kv_cache_dtype": "fp8_e4m3"},
        {"page_size": 4},
        {"json_model_override_args": '{"rope_theta": 5e5}'},
    ):
        other = StorageServer(folder, **options)
        other.answer("other", PROMPT)
        assert other.meta["other"].cached_tokens == 0, options
    shutil.copytree(folder, tmp_path / "copy")
    os.utime(tmp_path / "copy" / "model.safetensors")  # another checkpoint, for all that is known
    other = StorageServer(tmp_path / "copy")
    other.answer("other", PROMPT)
    assert other.meta["other"].cached_tokens == 0
    server.forget()
    add(
        server.scheduler, msgspec.structs.replace(request("salted", PROMPT, 8, ignore_eos=True), cache_namespace="salt")
    )
    while not server.scheduler.idle:
        server.steps(1)
    assert server.meta["salted"].cached_tokens == 0
    server.check()


def test_others_go_ahead_of_a_request_that_waits_for_files(folder: Path) -> None:
    server = StorageServer(folder)
    answer = server.answer("first", PROMPT)
    server.forget()
    server.files.gate.clear()
    server.add("waits", PROMPT)
    server.add("waits too", [*PROMPT, 5])
    server.add("goes ahead", OTHER)
    server.steps(30)
    assert len(server.collector.tokens["goes ahead"]) == 8 and "waits" not in server.collector.tokens
    server.scheduler.abort(AbortReq(rids=["waits"]))
    server.files.gate.set()
    while not server.scheduler.idle:
        server.steps(1)
    assert details(server, "waits too") == {"storage": 88}
    assert server.answer("again", PROMPT) == answer
    server.check()


def test_best_effort_waits_for_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = StorageServer(folder, hicache_storage_prefetch_policy="best_effort")
    answer = server.answer("first", PROMPT)
    server.forget()
    server.files.gate.clear()
    server.add("does not wait", PROMPT)
    assert server.answer_of("does not wait") == answer
    assert details(server, "does not wait") == {"storage": 0}
    server.files.gate.set()
    server.rest()
    server.check()


def test_a_wait_has_an_end(folder: Path) -> None:
    extra = '{"prefetch_threshold": 1, "prefetch_timeout_base": 0.05, "prefetch_timeout_per_ki_token": 0}'
    server = StorageServer(
        folder, hicache_storage_prefetch_policy="timeout", hicache_storage_backend_extra_config=extra
    )
    answer = server.answer("first", PROMPT)
    server.forget()
    server.files.gate.clear()
    server.add("late", PROMPT)
    assert server.answer_of("late") == answer
    assert details(server, "late") == {"storage": 0}
    server.files.gate.set()
    server.rest()
    assert server.storage.counts.unfulfilled_tokens
    server.check()


def test_files_that_cannot_be_read_cost_computation(folder: Path) -> None:
    server = StorageServer(folder)
    answer = server.answer("first", PROMPT)
    server.forget()
    server.files.fails = True
    assert server.answer("fails", PROMPT) == answer and details(server, "fails") == {"storage": 0}
    assert server.storage.counts.unfulfilled_tokens and server.runner.storage.num_failures == 1
    stats = server.scheduler.stats.snapshot().host_cache
    assert stats is not None and stats.storage is not None and stats.storage.storage_failures == 1
    server.check()


def test_what_is_not_a_number_leaves_the_files(folder: Path) -> None:
    server = StorageServer(folder)
    server.answer("first", PROMPT)
    engine = server.runner.storage
    names = PrefixNames(engine.fingerprint, np.array(PROMPT), None, engine.block)
    entries = [names.block(i) for i in range(len(PROMPT) // engine.block)]
    assert all(server.files.contains(entries))
    weights = server.runner.model.embed.weight
    with torch.inference_mode():
        row = weights[PROMPT[-1]].clone()
        weights[PROMPT[-1]] = torch.nan
        server.answer("breaks", PROMPT)
        weights[PROMPT[-1]] = row
    assert server.collector.finish["breaks"].status_code == 500
    assert not any(server.files.contains(entries))
    server.check()


def test_drafts_travel_with_their_target(folder: Path) -> None:
    draft = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(folder)}
    server = StorageServer(folder, speculative_num_steps=3, **draft)
    answer = server.answer("first", PROMPT)
    server.forget()
    for cache in (*server.runner.model.caches, *server.runner.drafter.caches):
        for tensor in cache._tensors.values():
            tensor.fill_(GARBAGE)
    totals = server.scheduler.stats.drafts.since_start
    proposed, correct = totals.proposed, totals.correct
    assert server.answer("returns", PROMPT) == answer and details(server, "returns")["storage"] == 88
    proposed, correct = totals.proposed - proposed, totals.correct - correct
    assert proposed and correct == proposed
    server.check()
