"""Random schedules of requests with twelve LoRA adapters and without any, of which two lie on the device and five in
main memory. They come through the front's adapters, several of one prompt at once, are aborted, sent back to the queue
and resumed; prefixes and adapters are evicted and read again, adapters unloaded and loaded while requests run, and
clients leave while an adapter is read. Each gets the tokens of transformers with its adapter merged into the weights.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from matrix import FEATURES

from sglang.srt.managers.front import adapters as front_adapters
from sglang.srt.managers.front.adapters import ServedAdapters
from sglang.srt.managers.front.control_calls import Undo
from sglang.srt.managers.scheduler.scheduler_process import SchedulerProcess
from sglang.srt.managers.wire.io_struct import ControlReply, ControlReq
from sglang.srt.mem_cache import host_tier
from sglang.srt.utils.engine_state import EngineState
from srt.managers.fake_runner import add, request
from srt.managers.test_adapters import FORMS, LINEAR, Adapters
from srt.managers.test_host_tier import HostSchedule
from srt.managers.test_random_schedules import OUTPUT, REQUESTS, Schedule, World, short_pauses

TWELVE: dict[str, dict[str, Any]] = FORMS | {
    f"rank {rank}": {"rank": rank, "names": LINEAR[:4]} for rank in range(2, 7)
}
COUNTS = (3, 24)
"""Tokens of an answer."""
PATIENCE = 30
"""Turns of the event loop behind which a call waits for requests to end."""
LORA = {
    "enable_lora": True, "max_lora_rank": 64, "max_loras_per_batch": 2, "max_loaded_loras": 5,
    "lora_drain_wait_threshold": 1e-9,
}  # fmt: skip


@dataclass
class AdapterWorld(World):
    """A tiny model with its adapters, and what each prompt gets with each."""

    adapters: Adapters | None = None

    def prepare(self) -> None:
        self.adapters = Adapters("qwen3", self.folder, TWELVE)
        self.folder = self.adapters.folder
        self.grow_tree()

    def alone(self, ids: list[int], output: int = OUTPUT) -> list[int]:
        return self.told(None, ids, min(output, COUNTS[-1]))

    def told(self, form: str | None, ids: list[int], count: int) -> list[int]:
        assert self.adapters is not None
        return self.adapters.greedy(form, ids, count)


class AdapterSchedule(Schedule):
    """A random run, and the front that loads its adapters."""

    world: AdapterWorld

    def __init__(self, world: AdapterWorld, seed: int) -> None:
        super().__init__(world, "none", 4, seed)
        self.process = SchedulerProcess.__new__(SchedulerProcess)
        self.process.scheduler, self.process.state = self.scheduler, EngineState()
        self.process.runner = self.scheduler.runner
        self.forms: dict[str, str | None] = {}
        self.most = 0
        self.loop = asyncio.new_event_loop()
        args = world.runner(4, "none")[0]
        self.front = ServedAdapters(args, self.control, self.scheduler.uses_adapter, world.folder)
        for form in TWELVE:
            self.wait(self.load(form))

    @property
    def table(self) -> Any:
        return self.scheduler.adapters

    async def control(self, kind: str, args: dict[str, Any], timeout: float, undo: Undo | None) -> ControlReply:
        if kind == "adapter_read":  # threads take their time, which shall not change the run
            self.table._reading[args["adapter"]].thread.join()
        reply = self.process.control(ControlReq("", kind, args))
        self.most = max(self.most, self.table.usage()["loaded"])
        self.seen[kind] += 1
        return reply

    async def load(self, form: str) -> None:
        assert self.world.adapters is not None
        await self.front.load(form, str(self.world.adapters.paths[form]))

    def wait(self, work: Coroutine[Any, Any, Any], patience: int | None = None) -> Any:
        """Returns what a call does; requests run on while it waits for them. patience: turns behind which its client
        leaves. None: it did."""

        async def both() -> Any:
            task, turns = asyncio.ensure_future(work), 0
            while not task.done():
                await asyncio.sleep(0)
                turns += 1
                if turns == patience:
                    task.cancel()
                    self.seen["left"] += 1
                elif turns % PATIENCE == 0:
                    self.advance()
            return None if task.cancelled() else task.result()

        return self.loop.run_until_complete(both())

    def advance(self) -> None:
        for decision in self.table.decisions():
            self.table.drain(decision.rid)
            self.seen["drained"] += 1
        self.scheduler.step()
        self.collector.take(self.scheduler)

    def arrive(self) -> None:
        if self.scheduler.host_tier is not None and self.random.random() < 0.7:
            self.scheduler.kv.tree.evict(1000)
        for _ in range(self.random.randrange(1, REQUESTS + 1)):
            if len(self.scheduler.reqs) > REQUESTS:
                return
            form, ids = self.random.choice((None, *TWELVE)), self.random.choice(self.world.prompts)
            patience = self.random.choice((None, None, None, 1))
            held = self.wait(self.front.hold(form), patience)
            if held is None:
                continue
            count = self.random.choice(COUNTS)
            for _ in range(self.random.choice((1, 1, 2, 3))):
                rid = f"r{len(self.wanted)}"
                self.wanted[rid], self.forms[rid] = (ids, count), form
                msg = request(rid, ids, count, temperature=0.0, ignore_eos=True)
                if form is not None:
                    (msg.adapter,) = held
                    msg.cache_namespace = msg.adapter
                add(self.scheduler, msg)
            self.front.release(held)

    def step(self) -> None:
        super().step()
        self.advance()
        if self.random.random() < 0.06:
            form = self.random.choice([*TWELVE])
            self.wait(self.front.unload(form))
            self.wait(self.load(form))

    def wrong(self) -> list[str]:
        wrong = []
        for rid, (ids, count) in self.wanted.items():
            got, want = self.collector.tokens.get(rid, []), self.world.told(self.forms[rid], ids, count)
            ended = self.collector.finish[rid]
            assert ended.type in ("length", "abort") and ended.status_code in (None, 499), (self.seed, rid, ended)
            if got != (want if ended.type == "length" else want[: len(got)]):
                wrong.append(f"{rid} of {self.forms[rid]}")
        return wrong

    def check(self) -> None:
        """Nothing holds an adapter, or is left of one."""
        super().check()
        assert not self.front._held and self.most <= LORA["max_loaded_loras"]
        for form in TWELVE:
            self.wait(self.front.unload(form))
        assert self.table.usage() == {"loaded": 0, "in_slots": 0} and not self.table._reading
        assert not self.front.loaded and not self.front._in_memory
        self.loop.close()


class HostAdapterSchedule(AdapterSchedule, HostSchedule):
    """The same with prefixes in main memory."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(host_tier, "MIN_GAIN", 1)
    monkeypatch.setattr(front_adapters, "POLL_S", 0.0)
    with short_pauses():
        yield


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> AdapterWorld:
    world = AdapterWorld("", tmp_path_factory.mktemp("world"), num_prompts=8)
    world.prepare()
    return world


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "drafts": {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4},
    "host tier": {**FEATURES["host cache"].flags, "hicache_write_policy": "write_through"},
}
SEEN = ("aborted", "resumed", "evicted", "unload_adapter", "left", "drained")


@pytest.mark.parametrize("seeds", [6, pytest.param(100, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("case", CASES)
def test_each_gets_the_tokens_of_its_adapter(world: AdapterWorld, case: str, seeds: int) -> None:
    world.options, seen = {**LORA, **CASES[case]}, Counter[str]()
    world.runners.clear()
    for seed in range(seeds):
        schedule = (HostAdapterSchedule if case == "host tier" else AdapterSchedule)(world, seed)
        schedule.run()
        seen += schedule.seen
    lacking = [what for what in (*SEEN, "saved" if case == "host tier" else "retracted") if not seen[what]]
    assert not lacking, seen
    assert seen["read_adapter"] > (len(TWELVE) + 1) * seeds, seen  # they were read again
