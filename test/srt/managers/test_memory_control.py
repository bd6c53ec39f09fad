"""Sleep and wake of a rank, with memory on the CPU that is overwritten when it is given back."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.layers.attention.sites import create_attention_sites
from sglang.srt.layers.attention.workspaces import zero_workspace
from sglang.srt.managers.scheduler.memory_control import NO_SAVER, MemoryControl
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.scheduler.scheduler_setup import create_runner
from sglang.srt.managers.scheduler.weight_updates import WeightUpdates
from sglang.srt.managers.wire.io_struct import AbortReq
from sglang.srt.model_executor import model_runner
from sglang.srt.model_executor.memory_saver.host_arenas import POISON
from sglang.srt.model_executor.memory_saver.saver import Part, complement
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.engine_state import CUDA_GRAPH, KV_CACHE, TAGS, WEIGHTS
from srt.managers.fake_runner import Collector, add, assert_clean, request, run_to_end
from srt.models.harness import VOCAB, save_tiny

NEW_TOKENS = 6


def prompt(seed: int, length: int = 20) -> list[int]:
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class Rank:
    """A scheduler of a tiny model whose memory can be given back."""

    def __init__(self, folder: Path, number: int = 0, rendezvous: str | None = None, **args: Any) -> None:
        flags: dict[str, Any] = {
            "max_total_tokens": 256,
            "max_running_requests": 4,
            "page_size": 1,
            "context_length": 64,
        }
        flags |= {"enable_memory_saver": True, **args}
        self.args = ServerArgs(
            model_path=str(folder),
            skip_tokenizer_init=True,
            random_seed=1,
            **flags,
        )
        self.runner = create_runner(self.args, number, rendezvous)
        self.scheduler = Scheduler(self.args, self.runner, StopChecker(None))
        self.memory = MemoryControl(self.scheduler, self.runner)
        self.weights = WeightUpdates(self.args, self.runner, self.scheduler, self.memory)
        self.number = 0

    def tokens(self, ids: list[int]) -> list[int]:
        self.number += 1
        rid, collector = f"r{self.number}", Collector()
        add(self.scheduler, request(rid, ids, max_new_tokens=NEW_TOKENS))
        run_to_end(self.scheduler, collector)
        return collector.tokens[rid]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    save_tiny("qwen3", made)
    return made


def weights(rank: Rank) -> list[torch.Tensor]:
    return [param.tensor for param in rank.runner.model.params.values()]


def test_memory_comes_back_with_its_content(folder: Path) -> None:
    rank = Rank(folder)
    ids = prompt(0)
    expected, before = rank.tokens(ids), [tensor.clone() for tensor in weights(rank)]
    places = [tensor.data_ptr() for tensor in weights(rank)]
    assert rank.memory.sleep([], keep_weights=True) == ""
    assert rank.memory.state.asleep == set(TAGS)
    poisoned = [tensor.flatten().view(torch.uint8) for tensor in weights(rank)]
    assert all(bool((tensor == POISON).all()) for tensor in poisoned)
    caches = [tensor for cache in rank.runner.pools.tensors[0] for tensor in cache.values()]
    assert all(bool((cache.flatten().view(torch.uint8) == POISON).all()) for cache in caches)
    assert rank.memory.wake([]) == ""
    assert rank.memory.state.serves
    assert [tensor.data_ptr() for tensor in weights(rank)] == places
    assert all(torch.equal(a, b) for a, b in zip(weights(rank), before, strict=True))
    assert rank.tokens(ids) == expected


def test_workspaces_of_attention_sleep_with_the_caches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []

    def create_with_workspace(*args: Any) -> Any:
        made.append(zero_workspace(1000, "cpu"))
        return create_attention_sites(*args)

    monkeypatch.setattr(model_runner, "create_attention_sites", create_with_workspace)
    rank = Rank(folder)
    (workspace,) = made
    assert not rank.memory.sleep([WEIGHTS], keep_weights=True) and not workspace.any()
    assert not rank.memory.sleep([KV_CACHE], keep_weights=True) and bool((workspace == POISON).all())
    assert not rank.memory.wake([]) and not workspace.any()


def test_by_tags_and_again(folder: Path) -> None:
    rank = Rank(folder)
    expected = rank.tokens(prompt(1))
    for tags in ([KV_CACHE], [KV_CACHE], [WEIGHTS, CUDA_GRAPH]):
        assert not rank.memory.sleep(tags, keep_weights=True)
    assert rank.memory.state.asleep == set(TAGS)
    for tags, left in (([CUDA_GRAPH], {WEIGHTS, KV_CACHE}), ([WEIGHTS], {KV_CACHE}), ([WEIGHTS], {KV_CACHE})):
        assert not rank.memory.wake(tags)
        assert rank.memory.state.asleep == left
        assert not rank.memory.state.serves
    assert not rank.memory.wake([])
    assert rank.tokens(prompt(1)) == expected
    assert "unknown tag" in rank.memory.sleep(["everything"], keep_weights=True)


def test_nothing_sleeps_while_requests_run(folder: Path) -> None:
    rank = Rank(folder)
    expected = rank.tokens(prompt(2))
    add(rank.scheduler, request("run", prompt(2), max_new_tokens=NEW_TOKENS))
    rank.scheduler.step()
    for tags in ([], [WEIGHTS], [KV_CACHE]):
        assert "requests run" in rank.memory.sleep(tags, keep_weights=True)
        assert rank.memory.state.serves
    rank.scheduler.pause("retract")
    assert not rank.memory.sleep([], keep_weights=True)
    assert not rank.memory.wake([])
    rank.scheduler.paused = False
    collector = Collector()
    run_to_end(rank.scheduler, collector)
    assert collector.tokens["run"] == expected
    assert_clean(rank.scheduler)


def test_weights_stay_where_requests_that_are_paused_hold_the_cache(folder: Path) -> None:
    rank = Rank(folder)
    expected = rank.tokens(prompt(3))
    collector = Collector()
    add(rank.scheduler, request("run", prompt(3), max_new_tokens=NEW_TOKENS))
    rank.scheduler.step()
    rank.scheduler.pause("in_place")
    assert rank.memory.sleep([KV_CACHE], keep_weights=True)
    assert not rank.memory.sleep([WEIGHTS], keep_weights=True)
    assert not rank.memory.wake([WEIGHTS])
    rank.scheduler.paused = False
    run_to_end(rank.scheduler, collector)
    assert collector.tokens["run"] == expected


def test_without_a_copy_the_weights_are_lost(folder: Path) -> None:
    rank = Rank(folder)
    kept = [tensor.clone() for tensor in weights(rank)]
    expected = rank.tokens(prompt(4))
    rank.weights.served.written = True  # tensors were sent, which no directory has
    assert not rank.memory.sleep([], keep_weights=False)
    assert not rank.memory.wake([])
    assert not rank.memory.state.serves
    assert "without its weights" in rank.memory.state.problem
    for tensor, content in zip(weights(rank), kept, strict=True):
        assert not torch.equal(tensor, content)
        with torch.inference_mode():
            tensor.copy_(content)
    rank.memory.state.weights_restored()
    rank.memory.weights_changed()
    assert rank.tokens(prompt(4)) == expected  # what no file holds was kept


def test_lost_weights_are_read_again(folder: Path) -> None:
    """Once nothing sleeps any more: whoever wakes the weights alone is going to send others."""
    rank = Rank(folder)
    expected = rank.tokens(prompt(4))
    for tags in ([], [WEIGHTS, KV_CACHE]):
        assert not rank.memory.sleep([], keep_weights=False)
        assert rank.runner.memory_saver is not None
        assert rank.runner.memory_saver.host_bytes < 0.1 * rank.runner.memory_saver.sizes()[WEIGHTS]
        assert not rank.memory.wake(tags, "key")
        assert rank.memory.state.weights_lost == bool(tags)
        assert not rank.memory.wake([], "key")
        assert rank.memory.state.serves
        assert rank.tokens(prompt(4)) == expected


def test_weights_that_cannot_be_read_again(folder: Path, tmp_path: Path) -> None:
    gone = Path(shutil.copytree(folder, tmp_path / "gone"))
    rank = Rank(gone)
    expected = rank.tokens(prompt(4))
    assert not rank.memory.sleep([], keep_weights=False)
    gone.rename(tmp_path / "elsewhere")
    assert "cannot be read again" in rank.memory.wake([], "key")
    assert rank.memory.state.asleep == set(TAGS)
    (tmp_path / "elsewhere").rename(gone)
    assert not rank.memory.wake([], "key")
    assert rank.tokens(prompt(4)) == expected


def test_weights_that_could_not_come_back_are_not_given_away(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(folder)
    monkeypatch.setattr(rank.weights.served, "refuse", lambda: "no")
    monkeypatch.setattr(rank.weights.served, "problem_of_reading", lambda: "experts lie in main memory")
    assert "keep them in main memory" in rank.memory.sleep([], keep_weights=False)
    assert rank.memory.state.serves
    assert not rank.memory.sleep([], keep_weights=True)


def test_weights_that_changed_are_copied_again(folder: Path) -> None:
    rank = Rank(folder)
    assert not rank.memory.sleep([], keep_weights=True)
    assert not rank.memory.wake([])
    with torch.inference_mode():
        weights(rank)[0].mul_(2)
    rank.memory.weights_changed()
    changed = weights(rank)[0].clone()
    assert not rank.memory.sleep([], keep_weights=True)
    assert not rank.memory.wake([])
    assert torch.equal(weights(rank)[0], changed)
    assert rank.memory.state.serves


def test_damaged_weights_are_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(folder)
    saver = rank.runner.memory_saver
    assert saver is not None
    monkeypatch.setattr(saver, "_restore", lambda copy: None)
    assert not rank.memory.sleep([], keep_weights=True)
    assert not rank.memory.wake([])
    assert "other results" in rank.memory.state.problem


def test_weights_that_nothing_writes_are_copied_once(folder: Path) -> None:
    rank = Rank(folder)
    saver = rank.runner.memory_saver
    assert saver is not None
    assert not rank.memory.sleep([], keep_weights=True)
    assert not rank.memory.wake([])
    del saver.seconds["save"]
    assert not rank.memory.sleep([], keep_weights=True)
    assert "save" not in saver.seconds


def test_waking_needs_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(folder)
    saver = rank.runner.memory_saver
    assert saver is not None
    assert not rank.memory.sleep([], keep_weights=True)
    monkeypatch.setattr(saver.arenas, "free_bytes", lambda: 1000)
    assert "0.00 GB are free" in rank.memory.wake([])
    assert rank.memory.state.asleep == set(TAGS)

    def refuse(tag: str) -> None:
        raise MemoryError("CUDA error 2")

    monkeypatch.setattr(saver.arenas, "free_bytes", lambda: None)
    with monkeypatch.context() as patched:
        patched.setattr(saver.arenas, "map", refuse)
        assert "too little memory" in rank.memory.wake([])
    assert rank.memory.state.asleep == set(TAGS)
    assert not rank.memory.wake([])


def test_without_the_flag(folder: Path) -> None:
    rank = Rank(folder, enable_memory_saver=False)
    assert rank.memory.sleep([], keep_weights=True) == rank.memory.wake([]) == NO_SAVER


def test_main_memory_without_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(folder)
    monkeypatch.setattr("sglang.srt.model_executor.memory_saver.saver.free_memory_bytes", lambda device: 1 << 20)
    assert "GB are free" in rank.memory.sleep([], keep_weights=True)
    assert rank.memory.state.serves


def test_prefixes_in_main_memory_survive(folder: Path) -> None:
    rank = Rank(folder, enable_hierarchical_cache=True, hicache_size=1, page_size=1)
    ids = prompt(5, 40)
    expected = rank.tokens(ids)
    tier = rank.scheduler.host_tier
    assert tier is not None
    while not tier._becomes_ready():
        pass
    rank.tokens(ids)
    for _ in range(2):
        assert not rank.memory.sleep([], keep_weights=True)
        assert not rank.memory.wake([])
    assert tier.host.tree.total_size() >= 39
    assert rank.scheduler.kv.tree.total_size() == 0
    assert rank.tokens(ids) == expected
    tier.check()


@pytest.mark.parametrize("seed", range(3))
def test_random_sequences(seed: int, folder: Path) -> None:
    """Whatever happens in between, a request gets the tokens that it gets from a fresh server, or is refused."""
    rank, rng = Rank(folder), random.Random(seed)
    prompts = [prompt(10 + number) for number in range(3)]
    expected = {tuple(ids): rank.tokens(ids) for ids in prompts}
    served = refused = 0

    def some_tags() -> list[str]:
        return rng.sample(TAGS, rng.randint(0, len(TAGS)))

    def ask() -> None:
        nonlocal served, refused
        ids = rng.choice(prompts)
        if rank.memory.state.serves and not rank.scheduler.paused:
            assert rank.tokens(ids) == expected[tuple(ids)]
            served += 1
        else:
            refused += 1

    def abort() -> None:
        rank.scheduler.abort(AbortReq(abort_all=True))

    def begin() -> None:
        if rank.memory.state.serves and not rank.scheduler.paused:
            rank.number += 1
            add(rank.scheduler, request(f"r{rank.number}", rng.choice(prompts), max_new_tokens=NEW_TOKENS))
            rank.scheduler.step()

    def pause() -> None:
        rank.scheduler.pause(rng.choice(("abort", "retract", "in_place")))

    def go_on() -> None:
        if rank.memory.state.serves:
            rank.scheduler.paused = False

    def sleep() -> None:
        rank.memory.sleep(some_tags(), keep_weights=True)

    def wake() -> None:
        assert not rank.memory.wake(some_tags())

    moves: list[Callable[[], None]] = [ask, ask, abort, begin, pause, go_on, go_on, sleep, sleep, wake, wake, wake]
    for _ in range(80):
        rng.choice(moves)()
    assert not rank.memory.wake([])
    rank.scheduler.paused = False
    abort()
    for ids in prompts:
        assert rank.tokens(ids) == expected[tuple(ids)]
    assert_clean(rank.scheduler)
    assert served and refused


def test_what_is_left_of_segments() -> None:
    assert complement([100, 50], [1000, 5000], []) == (Part(0, 0, 100), Part(1, 0, 50))
    lost = [(1010, 20), (1030, 10), (5000, 50), (900, 5)]
    assert complement([100, 50], [1000, 5000], lost) == (Part(0, 0, 10), Part(0, 40, 100))
