"""Random schedules over tiny models with recurrent states: requests of one conversation tree come, are aborted, sent
back to the queue, evicted and resumed. Every request gets the tokens that it gets alone, and in the end no slot and no
row of a state is missing. What a step must not read is filled with large numbers first."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.managers.wire.io_struct import AbortReq
from sglang.srt.mem_cache import kv_table
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import ServerArgs
from srt.managers.fake_runner import Collector, add, assert_clean, request, run_to_end
from srt.models.harness import random_tokens, save_tiny

MODELS = ("qwen3_5", "qwen3_next", "nemotron_h", "qwen3_5_moe")
PAGES = (1, 4, 16)
OUTPUT, TRUNK = 40, 64
REQUESTS, POOL = 4, 176
"""Room for little more than one long request: they push each other's prefixes out, and each other back to the queue."""
GARBAGE = 1e3
MANY, PARTS, FEW = 1000, 8, 12


@dataclass
class World:
    """What the schedules of one model share. Loading costs more than a schedule."""

    folder: Path
    prompts: list[list[int]] = field(default_factory=list)
    outputs: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    runners: dict[int, tuple[ServerArgs, ModelRunner]] = field(default_factory=dict)

    def runner(self, page: int) -> tuple[ServerArgs, ModelRunner]:
        if page not in self.runners:
            args = ServerArgs.from_kwargs(
                model_path=str(self.folder), device="cpu", skip_tokenizer_init=True, page_size=page,
                max_total_tokens=POOL // page * page, max_running_requests=REQUESTS, chunked_prefill_size=32,
                context_length=160, schedule_conservativeness=0.01,
            )  # fmt: skip
            self.runners[page] = args, create_runner(args)
        return self.runners[page]

    def alone(self, ids: list[int], output: int = OUTPUT) -> list[int]:
        """The plain run: at once, without a cache."""
        key = (output, *ids)
        if key not in self.outputs:
            args, runner = self.runner(1)
            plain = replace(args, disable_radix_cache=True, disable_overlap_schedule=True)
            scheduler, collector = Scheduler(plain, runner, StopChecker(None)), Collector()
            add(scheduler, request("plain", ids, output, temperature=0.0, ignore_eos=True))
            run_to_end(scheduler, collector)
            self.outputs[key] = collector.tokens["plain"]
        return self.outputs[key]

    def grow_tree(self, count: int) -> None:
        """Two trunks; prompts leave them at every depth, go on from an output, or are a trunk's beginning."""
        rng = random.Random(0)
        trunks = [random_tokens(TRUNK, seed) for seed in (1, 2)]
        for i in range(count):
            ids = rng.choice(trunks)[: rng.randrange(1, TRUNK + 1)]
            if i % 3 == 1 and self.prompts:
                earlier = rng.choice(self.prompts)
                ids = earlier + self.alone(earlier)[: rng.randrange(OUTPUT)]
            if i % 3 != 2:
                ids = ids + random_tokens(rng.randrange(1, 12), seed=100 + i)
            self.prompts.append(ids[: TRUNK + 30])


class Schedule:
    """One random run over a fresh scheduler."""

    def __init__(self, world: World, seed: int) -> None:
        self.random, self.world, self.seed = random.Random(seed), world, seed
        page = PAGES[seed % len(PAGES)]
        args, runner = world.runner(page)
        self.scheduler = Scheduler(args, runner, StopChecker(None))
        self.scheduler.steps_ahead = self.random.randrange(4)
        for cache in runner.model.caches:
            for name in ("state", "conv") if cache.name == "state" else ("k", "v"):
                cache[name].fill_(GARBAGE)
        self.collector = Collector()
        self.wanted: dict[str, tuple[list[int], int]] = {}
        self.seen: Counter[str] = Counter()
        self.hits: Counter[int] = Counter()

    def arrive(self) -> None:
        for _ in range(self.random.randrange(1, REQUESTS + 1)):
            if len(self.scheduler.reqs) > REQUESTS:
                return
            rid, ids = f"r{len(self.wanted)}", self.random.choice(self.world.prompts)
            self.wanted[rid] = ids, self.random.choice((3, 9, OUTPUT))
            add(self.scheduler, request(rid, ids, self.wanted[rid][1], temperature=0.0, ignore_eos=True))

    def step(self) -> None:
        for _ in range(self.random.randrange(1, 9)):
            waiting = list(self.scheduler.waiting)
            self.scheduler.step()
            for req in waiting:
                if req.slot and not req.num_retractions:
                    self.hits[req.hit_len] += 1
                if req.slot and req.num_retractions:
                    self.seen["resumed"] += 1
            self.collector.take(self.scheduler)

    def abort(self) -> None:
        if self.scheduler.reqs:
            rid = self.random.choice(sorted(self.scheduler.reqs))
            self.scheduler.abort(AbortReq(rids=[rid]))
            self.seen["aborted"] += 1

    def retract(self) -> None:
        """All that run, as a pause of the server does."""
        self.scheduler.pause("retract")
        self.scheduler.paused = False
        self.collector.take(self.scheduler)

    def evict(self) -> None:
        tokens, states = self.scheduler.kv.tree, self.scheduler.kv.checkpoints
        assert states is not None
        if self.random.random() < 0.5:
            self.seen["evicted"] += tokens.evict(self.random.randrange(1, 60)) > 0
            return
        kept = [node for node in tokens.nodes() if node.checkpoint]
        for node in self.random.sample(kept, min(len(kept), 2)):
            states.drop(node)
            self.seen["states dropped"] += 1

    def run(self) -> None:
        operations = [self.arrive] * 3 + [self.step] * 6 + [self.abort, self.retract, self.evict]
        for _ in range(self.random.randrange(8, 25)):
            self.random.choice(operations)()
        run_to_end(self.scheduler, self.collector)
        for rid, (ids, count) in self.wanted.items():
            got, want = self.collector.tokens[rid], self.world.alone(ids)[:count]
            ended = self.collector.finish[rid]
            assert ended.type in ("length", "abort") and ended.status_code in (None, 499), (self.seed, rid, ended)
            assert got == (want if ended.type == "length" else want[: len(got)]), (self.seed, rid)
        self.seen["retracted"] += self.scheduler.stats.num_retracted
        assert_clean(self.scheduler)
        self.scheduler.kv.reset()
        self.scheduler.kv.check()
        memory = self.scheduler.check_memory()
        assert memory["free"] == memory["total"] == self.scheduler.plan.max_total_num_tokens
        assert memory["checkpoints"]["free"] == memory["checkpoints"]["total"] > 0


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[World]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_table, "PAUSE_UNIT", 8)
        patch.setattr(kv_table, "PAUSE_LEAST", 16)
        torch.set_num_threads(1)
        found = []
        for name in MODELS:
            world = World(tmp_path_factory.mktemp(name))
            save_tiny(name, world.folder)
            world.grow_tree(30)
            found.append(world)
        yield found


def schedules(worlds: list[World], seeds: range) -> tuple[Counter[str], dict[int, Counter[int]]]:
    """What was done, and the depths of the hits by page size."""
    seen: Counter[str] = Counter()
    hits: dict[int, Counter[int]] = {page: Counter() for page in PAGES}
    for seed in seeds:
        schedule = Schedule(worlds[seed // len(PAGES) % len(worlds)], seed)
        schedule.run()
        seen += schedule.seen
        hits[PAGES[seed % len(PAGES)]] += schedule.hits
    return seen, hits


def test_random_schedules(worlds: list[World]) -> None:
    seen, hits = schedules(worlds, range(FEW))
    for kind in ("aborted", "retracted", "resumed", "evicted", "states dropped"):
        assert seen[kind], f"no request was {kind}"
    assert all(len(depths) > 2 for depths in hits.values()), hits


@pytest.mark.slow
@pytest.mark.schedules
@pytest.mark.timeout(0)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_thousand_random_schedules(worlds: list[World], part: int, capsys: pytest.CaptureFixture[str]) -> None:
    size = MANY // PARTS
    seen, hits = schedules(worlds, range(part * size, (part + 1) * size))
    admissions = sum(sum(found.values()) for found in hits.values())
    depths = {page: sorted(found) for page, found in hits.items()}
    with capsys.disabled():
        print(f"\n{size} schedules: {dict(seen)}, {admissions} admissions, hits at {depths}", flush=True)
    assert len(hits[1]) > 20 and len(hits[4]) > 8 and len(hits[16]) > 3


@pytest.mark.parametrize("page", PAGES)
def test_a_hit_at_every_depth(worlds: list[World], page: int) -> None:
    """Of a trunk: its beginning first, then a prompt that leaves it there."""
    world = worlds[PAGES.index(page)]
    args, runner = world.runner(page)
    trunk = random_tokens(TRUNK, seed=7)
    for depth in range(page, TRUNK, page):
        scheduler, collector = Scheduler(args, runner, StopChecker(None)), Collector()
        prompts = {"begins": trunk[: depth + page - 1], "leaves": [*trunk[:depth], 5, 6, 7]}
        for rid, ids in prompts.items():
            add(scheduler, request(rid, ids, 3, temperature=0.0, ignore_eos=True))
            run_to_end(scheduler, collector)
            assert collector.tokens[rid] == world.alone(ids, 3), (rid, depth)
        assert scheduler.stats._cached == depth
        assert_clean(scheduler)
