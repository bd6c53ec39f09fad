"""Prefixes in main memory over tiny models of every kind of cache, with pools so small that every prefix is evicted,
and copies that are late, fail, or end in another order than they were begun."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from matrix import FEATURES, LAYOUTS
from rank_processes import run_ranks

from sglang.srt.distributed import parallel_state
from sglang.srt.managers.front.native_output import request_info
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.managers.wire.io_struct import AbortReq, TokenMeta
from sglang.srt.mem_cache import host_tier
from sglang.srt.mem_cache.cache_tier import CopyState, PageMoves
from sglang.srt.mem_cache.copy_engine import Copier, PendingCopy, ThreadedCopies
from sglang.srt.mem_cache.host_tier import HostTier
from sglang.srt.mem_cache.layerwise_load import FIRST, LayerWaits, LayerwiseLoad
from sglang.srt.mem_cache.page_pool import PagePool
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.models.causal_lm import DecoderLayer
from sglang.srt.plan.ranks import ONE_RANK, RankLayout
from sglang.srt.server_args import ServerArgs
from srt.managers.fake_runner import Collector, add, assert_clean, request
from srt.managers.test_random_schedules import FEW_PROMPTS, Schedule, World, short_pauses
from srt.models.harness import random_tokens, save_tiny


class Trouble(Exception):
    pass


class TroubledCopies(ThreadedCopies):
    """Copies in several threads, each of which sleeps as long as it likes; some fail, and leave garbage behind."""

    def __init__(
        self, pools: Sequence[PagePool], device: torch.device | str, failures: float = 0.1, seed: int = 0
    ) -> None:
        self.random, self.failures, self.failed = random.Random(seed), failures, 0
        super().__init__(pools, device, num_threads=3)

    def run(self, pending: PendingCopy, copier: Copier) -> None:
        time.sleep(self.random.choice((0, 0, 0.001, 0.004)))
        if self.random.random() < 0.2:
            self._leave_garbage(pending)
            raise Trouble
        super().run(pending, copier)
        time.sleep(self.random.choice((0, 0, 0.001, 0.004)))

    def _leave_garbage(self, pending: PendingCopy) -> None:
        for pool, moves in zip(self.pools, pending.moves, strict=True):
            if len(moves) and pending.to_host:
                pool.host[moves.targets - 1] = 77
            elif len(moves):
                for part in pool.parts:
                    part[torch.from_numpy(moves.targets)] = 77


class HostWorld(World):
    """A model whose prefixes are kept in main memory by copies that make trouble."""

    def runner(self, page: int, draft_tokens: str, ranks: RankLayout = ONE_RANK) -> tuple[ServerArgs, ModelRunner]:
        args, runner = super().runner(page, draft_tokens, ranks)
        if not isinstance(runner.copies, TroubledCopies):
            assert runner.copies is not None
            share = runner.copies.share
            runner.copies = TroubledCopies(runner.copies.pools, "cpu", seed=self.rank)
            runner.copies.share = share
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

    def check(self) -> None:
        super().check()
        tier = self.scheduler.host_tier
        tier.check()
        self.seen["loaded"] += tier.counts.loaded_tokens
        self.seen["saved"] += tier.counts.saved_tokens
        self.seen["failed"] += tier.counts.failed_copies
        self.seen["by layer"] += tier.counts.layered_loads
        tier.reset()
        usage = tier.usage()
        assert usage["free"] == usage["total"]
        assert all(window["free"] == window["total"] for window in usage["windows"])
        if tier.host.checkpoints is not None:
            assert usage["checkpoints"]["free"] == usage["checkpoints"]["total"] > 0


def schedules(world: HostWorld, draft_tokens: str, page: int, seeds: range) -> Counter[str]:
    seen: Counter[str] = Counter()
    world.prepare()
    with loads_by_layers_sometimes():
        for seed in seeds:
            schedule = HostSchedule(world, draft_tokens, page, seed)
            schedule.run()
            seen += schedule.seen
    return seen


@contextmanager
def loads_by_layers_sometimes() -> Iterator[None]:
    """Half of the loads that may, also while requests decode beside the prompt. Alike on all ranks."""
    rng = random.Random(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostTier, "_layers_pay", lambda *_: rng.random() < 0.5)
        yield


@pytest.fixture(autouse=True)
def small_gains(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(host_tier, "MIN_GAIN", 1)
    monkeypatch.setattr(HostTier, "_layers_pay", lambda *_: False)
    with short_pauses():
        yield


COPIES = ("loaded", "saved", "failed")
"""What the schedules of each test must have seen."""

OPTIONS = dict(FEATURES["host cache"].flags)


@pytest.mark.parametrize(
    ("name", "draft_tokens", "page", "policy"),
    [("windows alone", "right", 4, "write_through_selective"), ("gated delta", "half-right", 4, "write_back")],
)
def test_random_schedules(name: str, draft_tokens: str, page: int, policy: str, tmp_path: Path) -> None:
    options = {**OPTIONS, "hicache_write_policy": policy}
    world = HostWorld(name, tmp_path, options=options, num_prompts=FEW_PROMPTS)
    seen: Counter[str] = Counter()
    for seed in range(24):  # threads decide what is copied in time
        seen += schedules(world, draft_tokens, page, range(seed, seed + 1))
        if all(seen[what] for what in COPIES):
            return
    raise AssertionError(seen)


WRITE_THROUGH = {**OPTIONS, "hicache_write_policy": "write_through"}


def _rank(rank: int, name: str, folder: Path, known: dict[str, Any], layouts: dict[str, int]) -> None:
    """With pages of so many tokens in each layout, one after the other."""
    host_tier.MIN_GAIN = 1
    with short_pauses():
        world = HostWorld(name, folder, rank=rank, options=WRITE_THROUGH, **known)
        for layout, page in layouts.items():
            world.ranks = LAYOUTS[layout]
            seen: Counter[str] = Counter()
            for seed in range(24):  # threads decide what is copied in time
                seen += schedules(world, "none", page, range(seed, seed + 1))
                if parallel_state.all_reduce_min([min(1, seen[what]) for what in COPIES]) == [1, 1, 1]:
                    break
            assert all(seen[what] for what in COPIES), (layout, seen)
            parallel_state.shutdown()


def test_two_ranks_agree_on_what_was_copied(tmp_path: Path) -> None:
    """Where they share a pool of latents, and where each has its own for a share of the tokens."""
    known = HostWorld("latents", tmp_path, options=WRITE_THROUGH, num_prompts=FEW_PROMPTS).known()
    run_ranks(_rank, ("latents", tmp_path, known, {"TP2": 1, "DCP2": 4}), 2)


# --- one thing at a time ----------------------------------------------------------------------------------------------


class GatedCopies(ThreadedCopies):
    """Copies that wait until the gate is open, and fail if they are told to."""

    def __init__(self, pools: Sequence[PagePool], device: torch.device | str) -> None:
        self.gate, self.fails = threading.Event(), False
        self.gate.set()
        super().__init__(pools, device)

    def run(self, pending: PendingCopy, copier: Copier) -> None:
        assert self.gate.wait(300)
        if self.fails:
            raise Trouble
        super().run(pending, copier)


class Server:
    """A scheduler whose copies pass a gate."""

    def __init__(self, folder: Path, name: str = "qwen3", **options: Any) -> None:
        if not (folder / "config.json").exists():
            save_tiny(name, folder)
        args = ServerArgs.from_kwargs(
            model_path=str(folder), device="cpu", skip_tokenizer_init=True, skip_server_warmup=True, random_seed=1,
            max_total_tokens=512, max_running_requests=4, chunked_prefill_size=32, **{**OPTIONS, **options},
        )  # fmt: skip
        self.runner = create_runner(args)
        if self.runner.copies is not None:
            self.copies = self.runner.copies = GatedCopies(self.runner.copies.pools, "cpu")
        self.scheduler, self.collector = Scheduler(args, self.runner, StopChecker(None)), Collector()
        self.meta: dict[str, TokenMeta] = {}

    @property
    def tier(self) -> HostTier:
        assert self.scheduler.host_tier is not None
        return self.scheduler.host_tier

    def add(self, rid: str, ids: list[int], output: int = 8) -> None:
        add(self.scheduler, request(rid, ids, output, temperature=0.0, ignore_eos=True))

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.scheduler.step()
            self._take()

    def _take(self) -> None:
        for message in self.scheduler.outbox:
            metas = zip(message.rids, message.meta, strict=True)
            self.meta |= {rid: meta for rid, meta in metas if meta is not None}
        self.collector.take(self.scheduler)

    def answer(self, rid: str, ids: list[int], output: int = 8) -> list[int]:
        self.add(rid, ids, output)
        while not self.scheduler.idle:
            self.steps(1)
        return self.collector.tokens[rid]

    def keep_in_main_memory_alone(self, ids: list[int]) -> list[int]:
        """Returns the answer to the prompt."""
        first = self.answer(f"first {len(self.collector.tokens)}", ids)
        again = self.answer(f"again {len(self.collector.tokens)}", ids)
        assert first == again
        assert self.scheduler.kv.tree.evict(512) > 0
        return first

    def check(self) -> None:
        assert_clean(self.scheduler)
        self.tier.check()


PROMPT, OTHER = random_tokens(90, seed=1), random_tokens(20, seed=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("qwen3")


def test_a_prefix_returns(folder: Path) -> None:
    server = Server(folder)
    answer = server.keep_in_main_memory_alone(PROMPT)
    assert server.answer("returns", PROMPT) == answer
    meta = server.meta["returns"]
    assert meta.cached_tokens == meta.host_tokens == len(PROMPT) - 1 and meta.started_time and not meta.num_retractions
    details = request_info("returns", meta, None)["cached_tokens_details"]
    assert details == {"device": 0, "host": len(PROMPT) - 1}
    assert server.answer("stays", PROMPT) == answer
    assert server.meta["stays"].cached_tokens == len(PROMPT) - 1 and server.meta["stays"].host_tokens == 0
    stats = server.scheduler.stats.snapshot().host_cache
    assert stats is not None and stats.load_back_tokens == len(PROMPT) - 1
    assert stats.load_back_bytes == stats.load_back_tokens * server.copies.page_bytes[0]
    assert stats.hicache_host_used_tokens >= len(PROMPT) - 1 and not stats.hicache_failed_copies
    assert not stats.load_back_overlapped_bytes and not stats.load_back_overlapped_seconds
    server.check()
    assert server.scheduler.flush_cache()
    assert server.tier.usage()["free"] == server.tier.usage()["total"]


def test_only_what_is_used_twice_is_copied(folder: Path) -> None:
    server = Server(folder)
    server.answer("once", PROMPT)
    assert not server.tier.counts.saved_tokens
    through = Server(folder, hicache_write_policy="write_through")
    through.answer("once", PROMPT)
    assert through.tier.counts.saved_tokens >= len(PROMPT)


def test_a_page_is_copied_when_it_is_evicted(folder: Path) -> None:
    """With write_back, whatever used it before; main memory gets it once, though eviction takes it bit by bit."""
    server = Server(folder, hicache_write_policy="write_back")
    answer = server.answer("first", PROMPT)
    assert server.answer("again", PROMPT) == answer
    tree, counts = server.scheduler.kv.tree, server.tier.counts
    assert not counts.saved_tokens and tree.total_size() >= len(PROMPT)
    cached = tree.total_size()
    assert tree.evict(2) == 2 and counts.saved_tokens == cached, "the end of a prefix, and with it all before"
    assert tree.evict(512) == cached - 2 and counts.saved_tokens == cached
    assert server.answer("returns", PROMPT) == answer
    assert server.meta["returns"].host_tokens == len(PROMPT) - 1
    tree.evict(512)
    assert counts.saved_tokens == cached and not counts.dropped_tokens
    server.copies.fails = True
    server.answer("other", OTHER)
    assert tree.evict(512) and counts.failed_copies and counts.saved_tokens == cached
    server.check()


def test_copies_at_eviction_share_what_begins_alike(folder: Path) -> None:
    """Two prompts that leave a trunk bring it once, though both are evicted at once."""
    server = Server(folder, hicache_write_policy="write_back")
    trunk = random_tokens(60, seed=5)
    for rid in range(3):
        server.answer(str(rid), [*trunk, rid + 3, *random_tokens(8, seed=10 + rid)])
    tree, counts = server.scheduler.kv.tree, server.tier.counts
    cached = tree.total_size()
    assert tree.evict(512) == cached and counts.saved_tokens == cached == server.tier.usage()["cached"]
    server.check()


def test_the_policy_of_a_running_server_changes(folder: Path) -> None:
    server = Server(folder)
    server.tier.use_policy("write_back")
    server.answer("first", PROMPT)
    assert server.scheduler.kv.tree.evict(512) and server.tier.counts.saved_tokens
    server.tier.use_policy("write_through_selective")
    saved = server.tier.counts.saved_tokens
    server.answer("other", OTHER)
    assert server.scheduler.kv.tree.evict(512) and server.tier.counts.saved_tokens == saved


def test_saves_keep_up_with_a_long_prompt(folder: Path) -> None:
    server = Server(folder, hicache_write_policy="write_through")
    server.tier.plan = replace(server.tier.plan, save_tokens=4)
    server.add("long", PROMPT)
    while not server.tier._copies:
        server.steps(1)
    assert next(iter(server.tier._copies)).transfer.num_tokens == 32, (
        "what a step computes, and not what a decode step hides"
    )
    while not server.scheduler.idle:
        server.steps(1)
    server.check()


def test_a_server_without_requests_notices_that_main_memory_is_ready(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = threading.Event()
    monkeypatch.setattr(GatedCopies, "ready", property(lambda _: ready.is_set(), lambda *_: None), raising=False)
    server = Server(folder, hicache_write_policy="write_through")
    server.add("early", PROMPT)
    while server.scheduler.reqs or server.scheduler.in_flight:
        server.steps(1)
    assert not server.scheduler.idle and not server.tier.usage()["ready"]
    ready.set()
    while not server.scheduler.idle:
        server.steps(1)
    assert server.tier.usage()["ready"] and server.tier.counts.saved_tokens >= len(PROMPT)
    server.check()


def test_a_server_whose_main_memory_fails_at_the_start_sleeps_and_answers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(self: Copier, pools: Sequence[PagePool]) -> None:
        raise Trouble

    monkeypatch.setattr(Copier, "warm_up", fails)
    monkeypatch.setattr(GatedCopies, "ready", property(lambda _: False, lambda *_: None), raising=False)
    server = Server(folder, hicache_write_policy="write_through")
    for rid in ("early", "late"):
        server.answer(rid, PROMPT)  # waits until the server is idle
    assert not server.tier.usage()["ready"] and not server.tier.counts.saved_tokens and not server.tier._offers
    assert caplog.text.count("Main memory cannot keep prefixes") == 1
    server.check()


def test_a_prompt_with_a_hint_is_copied_at_once_and_outlives_others(folder: Path) -> None:
    server = Server(folder)
    message = request("kept", PROMPT, 8, temperature=0.0, ignore_eos=True)
    message.received, message.keep_s = 1000.0, 300.0
    add(server.scheduler, message)
    while not server.scheduler.idle:
        server.steps(1)
    host = server.tier.host.tree
    assert server.tier.counts.saved_tokens >= len(PROMPT) and host.kept_size() >= len(PROMPT) - 1
    for rid in ("other", "other again"):
        server.answer(rid, OTHER)
    kept = host.kept_size()
    assert host.evict(host.total_size() - kept) and not server.scheduler.kv.tree.kept_size()
    assert len(server.tier.host.prefix(np.array(PROMPT), None).slots(0, 80)) == 80
    late = request("late", OTHER, 1, temperature=0.0)
    late.received = 1300.0
    add(server.scheduler, late)
    assert host.kept_size() == 0
    while not server.scheduler.idle:
        server.steps(1)
    server.check()


def test_a_hint_without_main_memory_keeps_the_prompt_on_the_gpu(folder: Path) -> None:
    server = Server(folder)
    server.scheduler.host_tier = server.scheduler.choice.host_tier = None
    message = request("kept", PROMPT, 8, temperature=0.0, ignore_eos=True)
    message.received, message.keep_s = 1000.0, 300.0
    add(server.scheduler, message)
    while not server.scheduler.idle:
        server.steps(1)
    server.answer("other", OTHER)
    tree = server.scheduler.kv.tree
    assert tree.kept_size() == len(PROMPT) and tree.evict(tree.total_size() - tree.kept_size())
    server.answer("again", PROMPT)
    assert server.meta["again"].cached_tokens == len(PROMPT) - 1


def test_others_go_ahead_of_a_request_that_waits_for_its_prefix(folder: Path) -> None:
    server = Server(folder)
    answer = server.keep_in_main_memory_alone(PROMPT)
    server.copies.gate.clear()
    server.add("waits", PROMPT)
    server.add("waits too", [*PROMPT, 5])
    server.add("goes ahead", OTHER)
    server.steps(30)
    assert len(server.collector.tokens["goes ahead"]) == 8 and "waits" not in server.collector.tokens
    memory = server.scheduler.check_memory()
    assert memory["loading"] == len(PROMPT) - 1, "once for both"
    assert memory["free"] + memory["cached"] + memory["loading"] + memory["held"] == memory["total"]
    server.scheduler.abort(AbortReq(rids=["waits"]))
    server.copies.gate.set()
    while not server.scheduler.idle:
        server.steps(1)
    assert server.meta["waits too"].cached_tokens == len(PROMPT) - 1
    assert server.answer("again", PROMPT) == answer
    server.check()


def test_a_load_that_fails_is_computed(folder: Path) -> None:
    server = Server(folder)
    answer = server.keep_in_main_memory_alone(PROMPT)
    server.copies.fails = True
    assert server.answer("fails", PROMPT) == answer
    assert server.meta["fails"].cached_tokens == 0 and server.tier.counts.failed_copies == 1
    server.check()


def test_a_flush_waits_for_copies(folder: Path) -> None:
    server = Server(folder)
    server.keep_in_main_memory_alone(PROMPT)
    server.copies.gate.clear()
    server.add("waits", PROMPT)
    server.steps(3)
    server.scheduler.abort(AbortReq(abort_all=True))
    threading.Timer(0.2, server.copies.gate.set).start()
    assert server.scheduler.flush_cache()
    server.check()
    assert server.scheduler.kv.usage()["free"] == server.scheduler.kv.size
    assert server.tier.usage()["cached"] == 0


def test_what_is_not_a_number_leaves_main_memory(folder: Path) -> None:
    server = Server(folder)
    server.keep_in_main_memory_alone(PROMPT)
    cached = server.tier.usage()["cached"]
    weights = server.runner.model.embed.weight
    with torch.inference_mode():
        row = weights[PROMPT[-1]].clone()
        weights[PROMPT[-1]] = torch.nan
        server.answer("breaks", PROMPT)
        weights[PROMPT[-1]] = row
    assert server.collector.finish["breaks"].status_code == 500
    assert server.tier.usage()["cached"] < cached
    server.check()


@pytest.mark.parametrize("layers", [False, True])
def test_caches_of_a_draft_travel_with_those_of_its_target(
    layers: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target that drafts for itself is right as long as the draft's keys and values are those of the prefix."""
    monkeypatch.setattr(HostTier, "_layers_pay", lambda *_: layers)
    draft = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(folder)}
    server = Server(folder, speculative_num_steps=3, **draft)
    answer = server.keep_in_main_memory_alone(PROMPT)
    for cache in (*server.runner.model.caches, *server.runner.drafter.caches):
        for tensor in cache._tensors.values():
            tensor.fill_(1e3)
    totals = server.scheduler.stats.drafts.since_start
    proposed, correct = totals.proposed, totals.correct
    assert server.answer("returns", PROMPT) == answer
    assert server.meta["returns"].host_tokens and server.tier.counts.layered_loads == layers
    proposed, correct = totals.proposed - proposed, totals.correct - correct
    assert proposed and correct == proposed


# --- loads by layers --------------------------------------------------------------------------------------------------


@pytest.fixture
def by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostTier, "_layers_pay", lambda *_: True)


def test_a_prompt_begins_when_its_first_layer_is_there(
    folder: Path, by_layer: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(folder)
    answer = server.keep_in_main_memory_alone(PROMPT)
    order: list[str] = []
    begun = threading.Event()
    arrived, compute = LayerwiseLoad.arrived, DecoderLayer.by_block
    layers = server.runner.model.layers

    def arrives(self: LayerwiseLoad, index: int, stream: Any) -> None:
        if index == len(self.layers) - 1:
            assert begun.wait(300), "no layer is computed before all have arrived"
            time.sleep(0.2)
        order.append(f"arrived {self.layers[index]}")
        arrived(self, index, stream)

    def computes(self: DecoderLayer, stream: Any, batch: Any) -> Iterator[None]:
        order.append(f"layer {layers.index(self)}")
        begun.set()
        return compute(self, stream, batch)

    monkeypatch.setattr(LayerwiseLoad, "arrived", arrives)
    monkeypatch.setattr(DecoderLayer, "by_block", computes)
    assert server.answer("returns", PROMPT) == answer
    last = len(layers) - 1
    assert order.index("arrived 0") < order.index("layer 0") < order.index(f"arrived {last}")
    assert order.index(f"arrived {last}") < order.index(f"layer {last}")
    meta = server.meta["returns"]
    assert meta.cached_tokens == meta.host_tokens == len(PROMPT) - 1 and server.tier.counts.layered_loads == 1
    stats = server.scheduler.stats.snapshot().host_cache
    assert stats is not None and stats.load_back_overlapped_bytes == stats.load_back_bytes > 0
    assert stats.load_back_overlapped_seconds == stats.load_back_seconds >= 0.2
    server.check()


def open_behind_the_step(server: Server) -> None:
    """Opens the gate of copies when a step that waits for one was launched."""
    while not server.tier.counts.layered_loads:
        time.sleep(0.01)
    time.sleep(0.2)
    server.copies.gate.set()


def test_a_step_behind_a_load_that_fails_is_computed_again(folder: Path, by_layer: None) -> None:
    server = Server(folder)
    answer = server.keep_in_main_memory_alone(PROMPT)
    server.copies.fails = True
    server.copies.gate.clear()
    server.add("fails", PROMPT)
    server.add("fails too", [*PROMPT[:80], 5, 6])
    threading.Thread(target=open_behind_the_step, args=(server,)).start()
    while not server.scheduler.idle:
        server.steps(1)
    assert server.collector.tokens["fails"] == answer and server.tier.counts.layered_loads == 1
    assert server.meta["fails"].cached_tokens == 0 and not server.meta["fails"].num_retractions
    server.check()
    server.copies.fails = False
    alone = Server(folder, disable_hierarchical_cache=True, enable_hierarchical_cache=False, hicache_ratio=None)
    assert server.collector.tokens["fails too"] == alone.answer("alone", [*PROMPT[:80], 5, 6])


def test_a_request_that_cannot_be_computed_again_waits_for_the_whole_load(folder: Path, by_layer: None) -> None:
    server = Server(folder)
    server.keep_in_main_memory_alone(PROMPT)
    message = request("wants log probabilities", PROMPT, 4, temperature=0.0, ignore_eos=True)
    message.return_logprob, message.logprob_start_len = True, 60
    add(server.scheduler, message)
    while not server.scheduler.idle:
        server.steps(1)
    assert not server.tier.counts.layered_loads and server.meta["wants log probabilities"].host_tokens
    server.check()


def test_layers_are_waited_for_only_where_nobody_else_waits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    server = Server(folder)
    plan, transfer = server.tier.plan, SimpleNamespace(num_tokens=64, arrival=SimpleNamespace(row=0))
    server.tier.plan = replace(plan, weight_bytes=int(plan.copied_bytes(64, False) * 36), memory_over_bus=36.0)
    assert server.tier._layers_pay(transfer, 1, others_wait=False)
    assert not server.tier._layers_pay(transfer, 1, others_wait=True)
    server.tier.plan = replace(server.tier.plan, weight_bytes=server.tier.plan.weight_bytes // 10)
    assert not server.tier._layers_pay(transfer, 1, others_wait=False)
    assert server.tier._layers_pay(transfer, 2560, others_wait=False), "a long rest hides the load"


def test_copies_are_paced_while_requests_decode(folder: Path) -> None:
    server = Server(folder)
    server.tier.plan = replace(server.tier.plan, paced_rate=1e9)
    server.add("decodes", OTHER)
    server.steps(3)
    assert server.scheduler.running.reqs and server.copies.budget.rate == 1e9
    while not server.scheduler.idle:
        server.steps(1)
    server.steps(1)
    assert server.copies.budget.rate is None


@pytest.mark.gpu
@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("last", [1 << 18, 132])
def test_pages_return_from_main_memory_as_they_were(last: int, by_kernel: bool) -> None:
    """Of a GPU: by streams of its own and page-locked memory, in runs and one by one, in bundles of parts."""
    parts = [torch.randint(0, 255, (257, width), dtype=torch.uint8, device="cuda") for width in (64, 4096, last)]
    before = [part.clone() for part in parts]
    copies = ThreadedCopies([PagePool(parts, 300, 1 << 17)], "cuda", by_kernel=by_kernel)
    copies.start()
    pages = torch.randperm(256).numpy() + 1
    for targets in (np.arange(1, 257), np.random.default_rng(0).permutation(299)[:256] + 1):
        for to_host in (True, False):
            moves = PageMoves(pages, targets) if to_host else PageMoves(targets, pages)
            pending = copies.submit([moves], to_host)
            while pending.state is CopyState.UNDER_WAY:
                time.sleep(0.001)
            assert pending.state is CopyState.DONE
            if to_host:
                for part in parts:
                    part[1:] = 0
        assert all(torch.equal(part[1:], old[1:]) for part, old in zip(parts, before, strict=True))


@pytest.mark.gpu
def test_layers_arrive_in_order_on_a_gpu() -> None:
    """A stream that waits for a layer sees all of its pages, and does not wait for the layers behind it."""
    layers = (0, 0, 1, 3)
    parts = [torch.randint(0, 255, (257, 4096), dtype=torch.uint8, device="cuda") for _ in layers]
    before = [part.clone() for part in parts]
    copies = ThreadedCopies([PagePool(parts, 300, 1 << 17, layers=layers)], "cuda")
    copies.start()
    while not copies.ready:
        time.sleep(0.01)
    assert copies.loads_layers
    pages = torch.randperm(256).numpy() + 1
    saved = copies.submit([PageMoves(pages, np.arange(1, 257))], True)
    while saved.state is CopyState.UNDER_WAY:
        time.sleep(0.001)
    for part in parts:
        part[1:] = 0
    load = copies.submit_layers([PageMoves(np.arange(1, 257), pages)])
    assert load.layers is not None
    waits = LayerWaits([load.layers])
    seen = []
    for layer in (FIRST, 0, 1, 2, 3):
        waits.before(layer)
        seen += [(part.clone(), old) for part, old, of in zip(parts, before, layers, strict=True) if of == layer]
    waits.finish()
    assert len(seen) == len(layers) and all(torch.equal(part, old) for part, old in seen)
