"""Attention groups with requests of their own (--attn-dp-size) give the tokens of one process: the schedule of
`test_parallel_schedules`, for every kind of model, with and without graphs, few and many rows of logits."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matrix import FEATURES, KINDS, LAYOUTS, cells, kinds, layouts, save_kind, smallest_kinds
from pairs import some_of
from rank_processes import run_ranks

from sglang.srt.distributed import parallel_state
from sglang.srt.layers import embedding
from sglang.srt.managers.scheduler import storage_control
from sglang.srt.managers.scheduler.attention_groups import AttentionGroups
from sglang.srt.managers.scheduler.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler.scheduler import Scheduler
from sglang.srt.managers.wire.io_struct import StorageStats
from sglang.srt.mem_cache import host_tier
from sglang.srt.mem_cache.storage import prefix_names
from sglang.srt.model_executor.step import GroupSteps, StepInput, padding_prompt
from sglang.srt.plan.ranks import ONE_RANK, RankLayout

from .fake_runner import Collector, add, assert_clean, request, run_to_end
from .test_parallel_schedules import CHUNK, NEW_TOKENS, PROMPTS, Outcome, outcome, play

POOL = 80
"""Tokens of a group: too few for two of the requests, so that some go back to the queue."""


def save_models(names: Iterable[str], ranks: RankLayout, folder: Path) -> dict[str, str]:
    """Returns where models of these kinds are, whose attention the ranks can share."""
    return {name: str(save_kind(name, folder / name, ranks)) for name in names}


def pool_of(name: str) -> int:
    """Tokens of a group's pool: more with large pages, of which a request has two at least."""
    return 112 if KINDS[name].page > 1 and "streams" in KINDS[name].tags else POOL


EIGHT_RANKS = layouts("8 ranks")
CELLS = [
    *cells(
        kinds(lacking="repeats, cut heads"),
        [layout for layout in layouts("DP", lacking="8 ranks") if LAYOUTS[layout].dcp_size == 1],
    ),
    *cells(kinds("one KV head"), [layout for layout in layouts("DP, DCP") if layout not in EIGHT_RANKS]),
    *cells(kinds("plain"), EIGHT_RANKS),
]
QUICK = ("DP2", "latents")
"""The one that is not thorough."""


def _play_without_agreement(scheduler: Scheduler | AttentionGroups) -> Outcome:
    """The schedule; beside what layers exchange, the tokens, and what masks have cost, no rank tells another
    anything."""
    agree, share = parallel_state.all_reduce_min, AttentionGroups._share_mask_times

    def refuse(*_: object) -> None:
        raise AssertionError("ranks agree on a step by a message of its own")

    def share_mask_times(groups: AttentionGroups, batches: list[ScheduleBatch | None]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parallel_state, "all_reduce_min", agree)
            share(groups, batches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AttentionGroups, "_share_mask_times", share_mask_times)
        for name in ("broadcast_bytes", "min_over_ranks", "all_reduce_min", "all_ranks_agree", "wait_for_all_ranks"):
            patch.setattr(parallel_state, name, refuse)
        return play(scheduler)


def _rank(rank: int, ranks: RankLayout, folders: dict[str, str], out: Path, flags: dict[str, Any]) -> None:
    """Once without graphs, once with; then steps of two rows and more leave the ranks their columns of the logits."""
    torch.set_num_threads(1)
    for name, folder in folders.items():
        for graphs in (False, True):
            replayed = set[int]() if graphs else None
            embedding.MIN_SHARDED_ROWS = 2 if graphs else 16
            more = {**flags, "max_total_tokens": pool_of(name)}
            meeting = f"file://{out}/rendezvous.{name}.{graphs}"
            result = outcome(folder, ranks, rank, meeting, replayed, schedule=_play_without_agreement, **more)
            (out / f"{name}.{graphs}.{rank}.json").write_text(json.dumps(result.__dict__))
            parallel_state.shutdown()
            assert not graphs or replayed, "steps had graphs"


def check(ranks: RankLayout, names: tuple[str, ...], tmp_path: Path) -> None:
    folders, groups = save_models(names, ranks, tmp_path), ranks.attn_dp_size
    alone = {name: outcome(folder, ONE_RANK, 0, None) for name, folder in folders.items()}
    flags: dict[str, Any] = {"chunked_prefill_size": CHUNK * groups, "max_running_requests": 4 * groups}
    flags["prefill_decode_interval"] = 1
    if ranks.dcp_size > 1:  # not pages of 16, as with states, of which so small a pool has too few for a request
        flags["page_size"] = ranks.dcp_size
    run_ranks(_rank, (ranks, folders, tmp_path, flags), ranks.world_size)
    for name, one in alone.items():
        for graphs in (False, True):
            files = [tmp_path / f"{name}.{graphs}.{rank}.json" for rank in range(ranks.world_size)]
            every = [Outcome(**json.loads(file.read_text())) for file in files]
            for rank, got in enumerate(every):
                _compare(got, one, every[0], groups, name, f"{name}, {graphs=}, rank {rank}")


def _compare(got: Outcome, one: Outcome, of_first_rank: Outcome, groups: int, name: str, where: str) -> None:
    """All ranks know the outcome of all groups. With four groups, and where prompts pause for their states, there is
    room for all requests."""
    assert got == of_first_rank, where
    assert got.finishes == one.finishes, where
    assert got.num_cached > 0, where
    assert got.num_retracted > 0 or groups > 2 or "states" in KINDS[name].tags, where
    aborted, other = got.tokens["aborted"], one.tokens["aborted"]
    assert aborted and aborted[: len(other)] == other[: len(aborted)] and len(aborted) < NEW_TOKENS, where
    assert {**got.tokens, "aborted": other} == one.tokens, where


@pytest.mark.parametrize(("layout", "name"), some_of(CELLS, [QUICK]))
def test_groups_give_the_tokens_of_one_process(layout: str, name: str, tmp_path: Path) -> None:
    check(LAYOUTS[layout], (name,), tmp_path)


def test_nothing_is_sampled_of_a_group_without_work() -> None:
    decode = StepInput(np.array([3, 4]), np.array([5, 2], np.int32), np.zeros(2, np.int32))
    steps = GroupSteps.of([None, decode, padding_prompt(7, 0, draft_tokens=False)])
    assert (steps.num_requests, steps.num_sampled) == ([0, 2, 1], [0, 2, 1])
    assert (steps.num_tokens, steps.num_prompts, steps.num_decodes) == ([1, 2, 7], 1, 2)


HOST_FLAGS = {**FEATURES["host cache"].flags, "hicache_ratio": 4.0, "hicache_write_policy": "write_through"}


STORE_FLAGS = HOST_FLAGS | {
    "hicache_storage_backend": "file",
    "hicache_storage_prefetch_policy": "wait_complete",
    "hicache_storage_backend_extra_config": '{"prefetch_threshold": 1}',
}


def _play_again(scheduler: Scheduler | AttentionGroups) -> Outcome:
    """The schedule; then the same prompts once more, whose prefixes have left the GPU and return from main memory, or
    have left that too and return from a store."""
    assert isinstance(scheduler, AttentionGroups)
    first = play(scheduler)
    stored = scheduler.runner.storage is not None
    for group in scheduler.schedulers:
        group.kv.tree.evict(1000)
        if stored:
            assert group.host_tier is not None
            group.host_tier.host.tree.evict(1000)
    collector, again = Collector(), ("plain", "penalized", "same prefix")
    for rid in again:
        params = {"frequency_penalty": 1.5, "repetition_penalty": 1.3} if rid == "penalized" else {}
        add(scheduler, request(f"{rid} again", PROMPTS[rid], NEW_TOKENS, ignore_eos=True, temperature=0.0, **params))
    run_to_end(scheduler, collector)
    assert {rid: collector.tokens[f"{rid} again"] for rid in again} == {rid: first.tokens[rid] for rid in again}
    tiers = scheduler.host_tiers
    assert len(tiers) == len(scheduler.schedulers)
    assert sum(tier.counts.loaded_tokens for tier in tiers) > 0
    assert not any(tier.counts.failed_copies for tier in tiers)
    stats = scheduler.stats.snapshot().host_cache
    assert stats is not None and stats.load_back_tokens == sum(tier.counts.loaded_tokens for tier in tiers)
    if stored:
        _check_store(scheduler, stats.storage)
    for group, tier in zip(scheduler.schedulers, tiers, strict=True):
        assert_clean(group)
        tier.check()
    return first


def _check_store(scheduler: AttentionGroups, stats: StorageStats | None) -> None:
    """Every rank knows what was moved for all groups, and has a store for its own."""
    counts = [tier.storage.counts for tier in scheduler.host_tiers if tier.storage is not None]
    assert len(counts) == len(scheduler.schedulers) and sum(count.read_tokens for count in counts) > 0
    assert stats is not None and stats.prefetched_tokens == sum(count.read_tokens for count in counts)
    assert 0 < stats.backuped_tokens < 10_000 and 0 < stats.backuped_bytes < 1 << 30 and not stats.storage_failures
    assert storage_control.detach(scheduler) == "" and not any(tier.storage for tier in scheduler.host_tiers)
    again = {"backend": "file", "prefetch_policy": None, "extra": None, "write_policy": None}
    assert storage_control.attach(scheduler, again) == "" and all(tier.storage for tier in scheduler.host_tiers)


def _host_rank(rank: int, ranks: RankLayout, folders: dict[str, str], out: Path, flags: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    host_tier.MIN_GAIN, prefix_names.MIN_BLOCK = 1, 8
    for name, folder in folders.items():
        os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = f"{out}/store.{name}"
        more = {**flags, "max_total_tokens": pool_of(name)}
        result = outcome(folder, ranks, rank, f"file://{out}/rendezvous.{name}", schedule=_play_again, **more)
        (out / f"{name}.{rank}.json").write_text(json.dumps(result.__dict__))
        parallel_state.shutdown()


HOST_CELLS = [
    (layout, flags)
    for layout in ("DP2", "TP4 x DP2, own heads", "DP2 x PP2", "TP4 x DP2 x DCP2")
    for flags in ("main memory", "store")
]


@pytest.mark.thorough
@pytest.mark.timeout(0)
@pytest.mark.parametrize(("layout", "where"), HOST_CELLS)
def test_prefixes_of_groups_return(layout: str, where: str, tmp_path: Path) -> None:
    """Each group keeps its own; ranks of other groups know what was copied, and copy nothing."""
    ranks = LAYOUTS[layout]
    wanted = smallest_kinds() if ranks.dcp_size == 1 else kinds("one KV head")
    names = tuple(name for _, name in cells(wanted, [layout]))
    folders = save_models(names, ranks, tmp_path)
    flags: dict[str, Any] = {
        "chunked_prefill_size": CHUNK * ranks.attn_dp_size,
        "max_running_requests": 4 * ranks.attn_dp_size,
        **(STORE_FLAGS if where == "store" else HOST_FLAGS),
        **({"page_size": ranks.dcp_size} if ranks.dcp_size > 1 else {}),
    }
    run_ranks(_host_rank, (ranks, folders, tmp_path, flags), ranks.world_size)
    for name, folder in folders.items():
        one = outcome(folder, ONE_RANK, 0, None)
        every = [Outcome(**json.loads((tmp_path / f"{name}.{r}.json").read_text())) for r in range(ranks.world_size)]
        for rank, got in enumerate(every):
            _compare(got, one, every[0], ranks.attn_dp_size, name, f"{name}, rank {rank}")
