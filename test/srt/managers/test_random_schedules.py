"""Random schedules over tiny models of every kind of cache, without draft tokens and with right, wrong and half-right
ones, on one rank and in two stages: requests of one conversation tree come, are aborted, sent back to the queue,
evicted and resumed. Every request gets the tokens that it gets alone, and in the end no slot and no row of a state is
missing. What a step must not read is filled with large numbers first."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import KINDS, cells, kinds, save_kind
from rank_processes import run_ranks

from sglang.srt.distributed import parallel_state
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.schedule_policy import DecodeInterval
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.managers.wire.io_struct import AbortReq
from sglang.srt.mem_cache import kv_table, radix_cache
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.plan.decode_interval import NEVER, IntervalRule
from sglang.srt.plan.ranks import ONE_RANK, RankLayout
from sglang.srt.server_args import ServerArgs
from srt.managers.fake_runner import Collector, add, assert_clean, request, run_to_end
from srt.model_executor.known_texts import KnownTexts, verifying_runner
from srt.models.harness import random_tokens

NAMES = kinds(lacking="cut heads, embedded")
DRAFT_TOKENS = {"none": None, "right": 0, "wrong": 1, "half-right": 2}
"""Every how manieth draft token is spoilt."""
PAGES = (1, 4, 16)
OUTPUT, TRUNK = 40, 64
NUM_PROMPTS, FEW_PROMPTS = 30, 12
"""In a tree of conversations, and in one of the schedules that `make test` runs: what each gets alone takes longer to
compute than these."""
REQUESTS, POOL = 4, 176
"""Room for little more than one long request: they push each other's prefixes out, and each other back to the queue."""
GARBAGE, GARBAGE_BYTE = 1e3, 0x7E
"""The byte is the largest e4m3 scale, and large codes, of four-bit keys and values."""
MANY, PARTS = 1008, 12

INTERVALS = (NEVER, IntervalRule(1, 1), IntervalRule(3, 2))


@dataclass
class World:
    """What the schedules of one model share. Loading costs more than a schedule."""

    name: str
    """A kind of `matrix`."""
    folder: Path
    ranks: RankLayout = ONE_RANK
    rank: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    """More arguments of the server."""
    num_prompts: int = NUM_PROMPTS
    prompts: list[list[int]] = field(default_factory=list)
    outputs: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    runners: dict[tuple[int, str, RankLayout], tuple[ServerArgs, ModelRunner]] = field(default_factory=dict)

    def runner(self, page: int, draft_tokens: str, ranks: RankLayout = ONE_RANK) -> tuple[ServerArgs, ModelRunner]:
        key = page, draft_tokens, ranks
        if key not in self.runners:
            args = ServerArgs.from_kwargs(
                model_path=str(self.folder), device="cpu", skip_tokenizer_init=True, page_size=page,
                max_total_tokens=POOL // page * page, max_running_requests=REQUESTS, chunked_prefill_size=32,
                context_length=160, schedule_conservativeness=0.01, pp_size=ranks.pp_size,
                tp_size=ranks.tp_size, dcp_size=ranks.dcp_size, **self.options,
            )  # fmt: skip
            several = ranks.world_size > 1
            rendezvous = f"file://{self.folder}/rendezvous-{page}-{draft_tokens}" if several else None
            spoil_every = DRAFT_TOKENS[draft_tokens]
            if spoil_every is None:
                runner = create_runner(args, self.rank if several else 0, rendezvous)
            else:
                drafter = KnownTexts(4, spoil_every, lookahead_slots=ranks.pp_size)
                outputs = {tuple(ids): self.alone(ids) for ids in self.prompts}
                runner = verifying_runner(args, drafter, outputs, self.rank, rendezvous)
            self.runners[key] = args, runner
        return self.runners[key]

    def alone(self, ids: list[int], output: int = OUTPUT) -> list[int]:
        """The plain run: at once, without a cache."""
        key = (output, *ids)
        if key not in self.outputs:
            args, runner = self.runner(KINDS[self.name].page, "none")
            plain = replace(args, disable_radix_cache=True, disable_overlap_schedule=True)
            scheduler, collector = Scheduler(plain, runner, StopChecker(None)), Collector()
            add(scheduler, request("plain", ids, output, temperature=0.0, ignore_eos=True))
            run_to_end(scheduler, collector)
            self.outputs[key] = collector.tokens["plain"]
        return self.outputs[key]

    def prepare(self) -> None:
        """Before the first schedule. The checkpoint is made, too."""
        if not self.prompts:
            save_kind(self.name, self.folder)
            self.grow_tree()

    def known(self) -> dict[str, Any]:
        """What ranks take over: the prompts, and what each gets alone, which is computed once and before they meet."""
        self.prepare()
        for ids in self.prompts:
            self.alone(ids)
        return {"prompts": self.prompts, "outputs": self.outputs}

    def grow_tree(self) -> None:
        """Two trunks; prompts leave them at every depth, go on from an output, or are a trunk's beginning."""
        rng = random.Random(0)
        trunks = [random_tokens(TRUNK, seed) for seed in (1, 2)]
        for i in range(self.num_prompts):
            ids = rng.choice(trunks)[: rng.randrange(1, TRUNK + 1)]
            if i % 3 == 1 and self.prompts:
                earlier = rng.choice(self.prompts)
                ids = earlier + self.alone(earlier)[: rng.randrange(OUTPUT)]
            if i % 3 != 2:
                ids = ids + random_tokens(rng.randrange(1, 12), seed=100 + i)
            self.prompts.append(ids[: TRUNK + 30])


class Schedule:
    """One random run over a fresh scheduler."""

    def __init__(self, world: World, draft_tokens: str, page: int, seed: int) -> None:
        self.random, self.world, self.seed = random.Random(seed), world, seed
        args, runner = world.runner(page, draft_tokens, world.ranks)
        self.scheduler = Scheduler(args, runner, StopChecker(None))
        self.scheduler.steps_in_flight = max(self.random.randrange(4), world.ranks.pp_size - 1)
        self.scheduler.interval = DecodeInterval(random.Random(seed).choice(INTERVALS), world.ranks.pp_size)
        for cache in runner.model.caches:
            for tensor in cache._tensors.values():
                narrow = tensor.element_size() == 1  # codes, and float8, which has no such number
                tensor.view(torch.uint8 if narrow else tensor.dtype).fill_(GARBAGE_BYTE if narrow else GARBAGE)
        self.collector = Collector()
        self.hints = random.Random(seed)
        """Of the prompts that are to stay cached, of the time, and of who takes turns, which decide nothing else."""
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
            if self.hints.random() < 0.2:
                self.scheduler.reqs[rid].keep_until = float(self.hints.randrange(1, 6))
            if self.hints.random() < 0.2:  # as if its grammar were slow to follow: it waits for its turn
                self.scheduler.reqs[rid].set_mask_ms(self.hints.choice((4, 16)))

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
        self.scheduler._expire(float(self.hints.randrange(6)))
        tokens, states = self.scheduler.kv.tree, self.scheduler.kv.checkpoints
        if states is None or self.random.random() < 0.5:
            self.seen["evicted"] += tokens.evict(self.random.randrange(1, 60)) > 0
            return
        kept = [node for node in tokens.nodes() if node.checkpoint]
        for node in self.random.sample(kept, min(len(kept), 2)):
            states.drop(node)
            self.seen["states dropped"] += 1

    def run(self) -> None:
        self.play()
        wrong = self.wrong()
        assert not wrong, (self.seed, wrong)
        self.check()

    def play(self) -> None:
        operations = [self.arrive] * 3 + [self.step] * 6 + [self.abort, self.retract, self.evict]
        for _ in range(self.random.randrange(8, 25)):
            self.random.choice(operations)()
        run_to_end(self.scheduler, self.collector)

    def wrong(self) -> list[str]:
        """Returns the requests that got other tokens than they get alone."""
        wrong = []
        for rid, (ids, count) in self.wanted.items():
            got, want = self.collector.tokens[rid], self.world.alone(ids)[:count]
            ended = self.collector.finish[rid]
            assert ended.type in ("length", "abort") and ended.status_code in (None, 499), (self.seed, rid, ended)
            if got != (want if ended.type == "length" else want[: len(got)]):
                wrong.append(rid)
        return wrong

    def check(self) -> None:
        """The pools are exact."""
        self.seen["retracted"] += self.scheduler.stats.num_retracted
        assert_clean(self.scheduler)
        self.scheduler.kv.reset()
        self.scheduler.kv.check()
        memory = self.scheduler.check_memory()
        assert memory["free"] == memory["total"] == self.scheduler.plan.max_total_num_tokens
        if self.scheduler.kv.checkpoints is not None:
            assert memory["checkpoints"]["free"] == memory["checkpoints"]["total"] > 0


@contextmanager
def short_pauses() -> Iterator[None]:
    """Chunks of so short prompts end where states are kept, too, and chains of so short paths are merged."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_table, "PAUSE_UNIT", 8)
        patch.setattr(kv_table, "PAUSE_LEAST", 16)
        patch.setattr(radix_cache, "MAX_PATH", 1)
        torch.set_num_threads(1)
        yield


Worlds = dict[str, World]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    with short_pauses():
        yield {name: World(name, tmp_path_factory.mktemp("model")) for name in NAMES}


@pytest.fixture(scope="module")
def small_worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    with short_pauses():
        yield {name: World(name, tmp_path_factory.mktemp("model"), num_prompts=FEW_PROMPTS) for name in NAMES}


@dataclass
class Report:
    seen: Counter[str] = field(default_factory=Counter)
    hits: dict[int, Counter[int]] = field(default_factory=lambda: {page: Counter() for page in PAGES})
    """Depths of the hits by page size."""

    def __str__(self) -> str:
        admissions = sum(sum(depths.values()) for depths in self.hits.values())
        depths = {page: sorted(found) for page, found in self.hits.items()}
        return f"{dict(self.seen)}, {admissions} admissions, hits at {depths}"


Drawn = tuple[str, str, int, int]
"""Kind, draft tokens, page size and seed of a schedule."""
COMBINATIONS = [
    (name, draft_tokens, page)
    for draft_tokens in DRAFT_TOKENS
    for name in NAMES
    for page in PAGES
    if page % KINDS[name].page == 0
]
QUICK: tuple[Drawn, ...] = (
    *(("dense", "none", 1, 0), ("dense", "none", 4, 1)),
    *(("windows alone", "right", 4, 25), ("windows alone", "right", 16, 26)),
    *(("gated delta", "wrong", 1, 51), ("gated delta", "wrong", 4, 52)),
    *(("Mamba-2", "half-right", 4, 79), ("Mamba-2", "half-right", 16, 80)),
)
"""Four kinds with other draft tokens each, so that few models are loaded, and pages of two sizes."""


def schedules(worlds: Worlds, drawn: Iterable[Drawn]) -> Report:
    report = Report()
    for name, draft_tokens, page, seed in drawn:
        worlds[name].prepare()
        schedule = Schedule(worlds[name], draft_tokens, page, seed)
        schedule.run()
        report.seen += schedule.seen
        report.hits[page] += schedule.hits
    return report


def test_random_schedules(small_worlds: Worlds) -> None:
    report = schedules(small_worlds, QUICK)
    for kind in ("aborted", "retracted", "resumed", "evicted", "states dropped"):
        assert report.seen[kind], f"no request was {kind}"
    assert all(len(depths) > 1 for depths in report.hits.values()), report.hits


@pytest.mark.slow
@pytest.mark.schedules
@pytest.mark.timeout(0)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_thousand_random_schedules(worlds: Worlds, part: int, capsys: pytest.CaptureFixture[str]) -> None:
    """In a row of as many as there are combinations each of them comes once."""
    size = MANY // PARTS
    seeds = range(part * size, (part + 1) * size)
    report = schedules(worlds, ((*COMBINATIONS[seed % len(COMBINATIONS)], seed) for seed in seeds))
    with capsys.disabled():
        print(f"\n{size} schedules: {report}", flush=True)
    assert len(report.hits[1]) > 20 and len(report.hits[4]) > 8 and len(report.hits[16]) > 3


def _stage(
    rank: int,
    name: str,
    folder: Path,
    known: dict[str, Any],
    draft_tokens: list[str],
    pages: tuple[int, ...],
    num_schedules: int,
) -> None:
    """One group of ranks after the other: there can be one at a time."""
    with short_pauses():
        world = World(name, folder, RankLayout(pp_size=2), rank, **known)
        for kind in draft_tokens:
            for page in pages:
                for seed in range(num_schedules):
                    Schedule(world, kind, page, seed).run()
                parallel_state.shutdown()


@pytest.mark.parametrize("name", ["gated delta"])
def test_random_schedules_in_two_stages(name: str, tmp_path: Path) -> None:
    with short_pauses():
        known = World(name, tmp_path, num_prompts=FEW_PROMPTS).known()
    run_ranks(_stage, (name, tmp_path, known, ["half-right"], (4,), 1), 2)


@pytest.mark.slow
@pytest.mark.schedules
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", [name for _, name in cells(NAMES, ["PP2"])])
def test_many_random_schedules_in_two_stages(name: str, tmp_path: Path) -> None:
    with short_pauses():
        known = World(name, tmp_path).known()
    pages = tuple(page for page in PAGES if page % KINDS[name].page == 0)
    run_ranks(_stage, (name, tmp_path, known, list(DRAFT_TOKENS), pages, 1), 2)


@pytest.mark.parametrize("page", PAGES)
def test_a_hit_at_every_depth(small_worlds: Worlds, page: int) -> None:
    """Of a trunk, beyond several units of pauses and two of the largest pages: its beginning first, then a prompt that
    leaves it there."""
    world = small_worlds["gated delta"]
    world.prepare()
    args, runner = world.runner(page, "none")
    trunk = random_tokens(TRUNK, seed=7)
    outputs = {"begins": 1, "leaves": 3}
    for depth in range(page, 41, page):
        scheduler, collector = Scheduler(args, runner, StopChecker(None)), Collector()
        prompts = {"begins": trunk[: depth + page - 1], "leaves": [*trunk[:depth], 5, 6, 7]}
        for rid, ids in prompts.items():
            add(scheduler, request(rid, ids, outputs[rid], temperature=0.0, ignore_eos=True))
            run_to_end(scheduler, collector)
            assert collector.tokens[rid] == world.alone(ids, outputs[rid]), (rid, depth)
        assert scheduler.stats._cached == depth
        assert_clean(scheduler)
