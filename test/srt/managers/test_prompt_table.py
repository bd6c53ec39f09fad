"""Prompts that wait: twelve bytes a token with their keys, shared by samples, and no more of them than the limit."""

from __future__ import annotations

import random
import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang.srt.managers.scheduler import attention_groups, intake, prompt_table
from sglang.srt.managers.scheduler.output import StopChecker
from sglang.srt.managers.scheduler.prompt_media import PromptMedia
from sglang.srt.managers.scheduler.prompt_table import MEDIA_BYTES, PromptTable, Tokens
from sglang.srt.managers.scheduler.scheduler import Scheduler
from srt.managers.fake_runner import Collector, FakeRunner, add, make_scheduler, request, run_to_end


def test_tokens_are_a_list_of_two_parts() -> None:
    rng, prompts = random.Random(0), PromptTable()
    for _ in range(200):
        plain = [rng.randrange(1 << 20) for _ in range(rng.randrange(6))]
        tokens = Tokens(prompts.take(plain))
        for _ in range(rng.randrange(5)):
            token = rng.randrange(1 << 20)
            plain.append(token)
            tokens.output.append(token)
        assert len(tokens) == len(plain) and list(tokens) == plain
        assert np.array_equal(np.asarray(tokens, np.int64), np.array(plain, np.int64))
        for start in (None, *range(-7, 12)):
            for end in (None, *range(-7, 12)):
                assert tokens[start:end] == plain[start:end]
        for index in range(-12, 12):
            if -len(plain) <= index < len(plain):
                assert tokens[index] == plain[index]
            else:
                with pytest.raises(IndexError):
                    tokens[index]


def test_equal_prompts_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    table = PromptTable()
    first, second, other = table.take([1, 2, 3]), table.take([1, 2, 3]), table.take([1, 2, 4])
    assert first is second and first is not other and table.num_bytes == 6 * 12 and first.ids.dtype == np.int32
    table.give_back(first)
    assert table.num_bytes == 6 * 12 and table.take([1, 2, 3]) is second
    for prompt in (second, second, other):
        table.give_back(prompt)
    assert table.num_bytes == 0 and len(table) == 0
    monkeypatch.setattr(prompt_table, "_name", lambda ids: (0, 0))
    one, another = table.take([1]), table.take([2])
    assert one is not another and table.take([1]) is one and table.num_bytes == 2 * 12, "of one hash"
    for prompt in (another, one, one):
        table.give_back(prompt)
    assert table.num_bytes == 0 and len(table) == 0


def test_keys_count() -> None:
    """The bytes of a prompt are those of its arrays, with those that requests with media have of their own."""
    table = PromptTable()
    prompt = table.take(range(50))
    assert table.num_bytes == prompt.ids.nbytes + prompt.keys.nbytes
    table.take(range(50), has_media=True)
    assert table.num_bytes == prompt.ids.nbytes + prompt.keys.nbytes + 50 * MEDIA_BYTES
    table.give_back(prompt, has_media=True)
    table.give_back(prompt)
    assert table.num_bytes == table.num_users == 0


def test_all_arrays_of_a_prompt_with_media_count() -> None:
    """Each sample has its own."""
    count = 100_000
    description: Any = SimpleNamespace(
        tower=SimpleNamespace(pooled_frames=1), num_tokens=lambda grid: count, both_ways=False, sections=(1, 1, 1),
        fill=0, merge=2, positions_a_second=0,
    )  # fmt: skip
    pixels = SimpleNamespace(shape=[4 * count])
    item: Any = SimpleNamespace(spans=[(0, count)], grid=(1, 2000, 200), digest=bytes(32), pixels=pixels, kind="image")
    tracemalloc.start()
    media = PromptMedia([item], count, description)
    keys = np.empty(count, np.int64)
    media.write_keys(keys)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 0.95 * count * MEDIA_BYTES < size < 1.05 * count * MEDIA_BYTES


def test_samples_that_wait_share_their_prompt() -> None:
    scheduler, collector = make_scheduler(FakeRunner(4096, 1, 1024, 4, 64)), Collector()
    ids = list(range(3, 103))
    for number in range(12):
        add(scheduler, request(f"sample {number}", ids, 4, ignore_eos=True))
    reqs = list(scheduler.reqs.values())
    assert all(req.tokens.prompt is reqs[0].tokens.prompt for req in reqs)
    assert all(req.cache_keys(64).base is reqs[0].cache_keys(64).base for req in reqs), "their keys are one, too"
    assert scheduler.totals.prompts.num_bytes == 100 * 12
    run_to_end(scheduler, collector)
    assert scheduler.totals.prompts.num_bytes == 0 and len(scheduler.totals.prompts) == 0


def test_parameters_beyond_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "MAX_PARAMETER_BYTES", 100, raising=False)
    scheduler, collector = make_scheduler(FakeRunner(4096, 1, 1024, 4, 64)), Collector()
    for rid, length in (("first", 60), ("second", 60), ("third", 40), ("none", 0)):
        add(scheduler, request(rid, [5, 6], 4, ignore_eos=True, stop=["x" * length] if length else []))
    run_to_end(scheduler, collector)
    refused = collector.finish["second"]
    assert refused.status_code == 503 and "send this one again later" in refused.message
    assert all(collector.finish[rid].type == "length" for rid in ("first", "third", "none"))
    add(scheduler, request("later", [5, 6], 4, ignore_eos=True, stop=["x" * 100]))
    run_to_end(scheduler, collector)
    assert collector.finish["later"].type == "length"


def test_prompts_beyond_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "MAX_PROMPT_BYTES", 100 * 12)
    scheduler, collector = make_scheduler(FakeRunner(4096, 1, 1024, 4, 64)), Collector()
    add(scheduler, request("alone", list(range(3, 113)), 4, ignore_eos=True))
    add(scheduler, request("its sample", list(range(3, 113)), 4, ignore_eos=True))
    add(scheduler, request("other", [5, 6], 4, ignore_eos=True))
    run_to_end(scheduler, collector)
    assert collector.finish["alone"].type == "length", "one that exceeds the limit may come alone"
    for rid in ("its sample", "other"):
        assert collector.finish[rid].status_code == 503 and "send this one again later" in collector.finish[rid].message
    assert scheduler.totals.prompts.num_bytes == 0
    add(scheduler, request("later", [5, 6], 4, ignore_eos=True))
    run_to_end(scheduler, collector)
    assert collector.finish["later"].type == "length"


def two_groups(monkeypatch: pytest.MonkeyPatch) -> list[Scheduler]:
    monkeypatch.setattr(attention_groups, "_GroupRunner", lambda runner, is_own: runner)
    monkeypatch.setattr(attention_groups, "replace", lambda args, **fields: SimpleNamespace(**vars(args) | fields))
    runner = FakeRunner(4096, 1, 1024, 4, 64)
    args = make_scheduler(runner).args
    args.load_balance_method = "round_robin"
    args.prefix_affinity_fallback = "total_tokens"
    runner.groups = SimpleNamespace(dp=SimpleNamespace(rank=0, size=2))
    return attention_groups.AttentionGroups(args, runner, StopChecker(None)).schedulers


def test_attention_groups_have_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank holds the prompts of all groups."""
    monkeypatch.setattr(intake, "MAX_PROMPT_BYTES", 100 * 12)
    first, second = two_groups(monkeypatch)
    collector = Collector()
    add(first, request("first", list(range(3, 83)), 4, ignore_eos=True))
    add(second, request("same", list(range(3, 83)), 4, ignore_eos=True))
    add(second, request("second", list(range(5, 85)), 4, ignore_eos=True))
    run_to_end(second, collector)
    assert collector.finish["same"].type == "length"
    assert collector.finish["second"].status_code == 503
    run_to_end(first, collector)
    assert collector.finish["first"].type == "length" and first.totals.prompts.num_bytes == 0


def test_attention_groups_have_one_limit_of_parameters_and_of_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "MAX_PARAMETER_BYTES", 100)
    first, second = two_groups(monkeypatch)
    assert first.intake.max_queued == second.intake.max_queued == intake.MAX_QUEUED_REQUESTS // 2
    collector = Collector()
    add(first, request("first", [5, 6], 4, ignore_eos=True, stop=["x" * 60]))
    add(second, request("second", [5, 6], 4, ignore_eos=True, stop=["x" * 60]))
    run_to_end(second, collector)
    assert collector.finish["second"].status_code == 503
    run_to_end(first, collector)
    assert collector.finish["first"].type == "length" and not first.totals.parameter_bytes
